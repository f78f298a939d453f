"""Weights by name: from safetensors files, or seeded random ones.

The engine process opens and validates a checkpoint before any rank starts (headers only, no data);
each rank opens it again and reads only what it holds.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import torch

from coterie.attention.models.config import ModelConfig
from coterie.attention.models.safetensors_file import (
    ITEM_SIZES,
    TensorInfo,
    read_header,
    read_header_bytes,
)
from coterie.attention.models.shapes import tensor_shapes
from coterie.errors import CheckpointError, ModelError

_INDEX_FILE: Final = "model.safetensors.index.json"
_SINGLE_FILE: Final = "model.safetensors"
_TORCH_DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
_DUMMY_STD: Final = 0.02


class WeightSource(Protocol):
    """Where a loader gets tensors from."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor, new, contiguous, converted to ``dtype``.

        Raises:
            CheckpointError: not there, or unreadable.
        """

    def read_rows(self, name: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Indices ``first..last-1`` of the leading dim; reads nothing else of the file."""


class Checkpoint:
    """A folder's safetensors file or files. Holds headers only; files are opened per read."""

    def __init__(self, model_dir: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.model_dir = model_dir
        self._tensors = tensors

    @staticmethod
    def open(model_dir: str | Path) -> "Checkpoint":
        """Read and check all headers of a folder.

        Raises:
            CheckpointError: no safetensors, a file of the index missing, a truncated or corrupt
                file; names file and tensor.
        """
        folder = Path(model_dir)
        tensors: dict[str, TensorInfo] = {}
        for path, names in _files(folder).items():
            header = read_header(path)
            for name in sorted(names):
                if name not in header:
                    raise CheckpointError(
                        f"{folder / _INDEX_FILE} places tensor {name} in {path.name}, which does "
                        "not have it; fetch both again"
                    )
            tensors |= header
        return Checkpoint(folder, tensors)

    def validate(self, config: ModelConfig) -> None:
        """Check that every tensor the model needs is there, in shape and dtype.

        Raises:
            CheckpointError: names the tensor, what was found and what was expected.
        """
        wanted = tensor_shapes(config)
        missing = [name for name in wanted if name not in self._tensors]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            hint = ""
            if missing == ["lm_head.weight"]:
                hint = "; if it shares the input embedding, set tie_word_embeddings in config.json"
            raise CheckpointError(
                f"{self.model_dir} lacks tensor {missing[0]}{more}, needed by "
                f"{config.architecture}{hint}"
            )
        for name, shape in wanted.items():
            info = self._tensors[name]
            if info.shape != shape:
                raise CheckpointError(
                    f"{info.path}: tensor {name} has shape {list(info.shape)}, config.json asks "
                    f"for {list(shape)}"
                )
            if not info.is_supported:
                raise CheckpointError(
                    f"{info.path}: tensor {name} has dtype {info.dtype}; "
                    f"supported: {', '.join(ITEM_SIZES)}"
                )

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.read_rows(name, 0, self._info(name).shape[0], dtype)

    def read_rows(self, name: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        info = self._info(name)
        assert 0 <= first <= last <= info.shape[0], f"rows {first}..{last} of {name} {info.shape}"
        rows = torch.empty((last - first, *info.shape[1:]), dtype=_TORCH_DTYPES[info.dtype])
        row_bytes = (info.end - info.start) // max(1, info.shape[0])
        if rows.numel():
            _read_exactly(info, name, rows, info.start + first * row_bytes)
        return rows.to(dtype)

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None or not info.is_supported or not info.shape:
            raise CheckpointError(f"{self.model_dir} has no readable tensor {name}")
        return info


class DummyCheckpoint:
    """Seeded random weights that need no files; equal on every rank.

    A tensor is a function of (seed, name, shape) alone: normal with standard deviation 0.02, norms
    are 1. Tensors of all experts of a layer are seeded per expert: a rank makes only its own.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._shapes = tensor_shapes(config)
        self._seed = seed

    def validate(self, config: ModelConfig) -> None:
        """Nothing can be missing."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shape(name)
        if len(shape) == 3:
            return self.read_rows(name, 0, shape[0], dtype)
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape, dtype=dtype)
        return self._normal(name, shape, 0).to(dtype)

    def read_rows(self, name: str, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shape(name)
        if len(shape) != 3:
            return self.read(name, dtype)[first:last].clone()
        rows = torch.empty((last - first, *shape[1:]), dtype=dtype)
        for index in range(first, last):
            rows[index - first] = self._normal(name, shape[1:], index)
        return rows

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None:
            raise CheckpointError(f"the model has no tensor {name}")
        return shape

    def _normal(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        key = f"{self._seed}/{name}/{shape}/{index}".encode()
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7], "little"))
        return torch.empty(shape).normal_(0.0, _DUMMY_STD, generator=generator)


def open_weights(
    model_dir: str | Path, config: ModelConfig, load_format: str, seed: int
) -> Checkpoint | DummyCheckpoint:
    """What ``--load-format`` names: dummy, or the folder's safetensors (auto, safetensors).

    Raises:
        CheckpointError: see ``Checkpoint.open``.
    """
    if load_format == "dummy":
        return DummyCheckpoint(config, seed)
    return Checkpoint.open(model_dir)


def model_hash(model_dir: str | Path, load_format: str = "auto") -> str:
    """Fingerprint of a folder, compared between ranks before weights load.

    Covers config.json and every safetensors header (names, shapes, dtypes, offsets), not the data.
    With load format dummy only config.json counts.

    Raises:
        ModelError: no config.json.
        CheckpointError: a file is missing or too short for its header.
    """
    folder = Path(model_dir)
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
    except OSError as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if load_format != "dummy":
        for path in sorted(_files(folder)):
            digest.update(path.name.encode())
            digest.update(read_header_bytes(path))
    return digest.hexdigest()


def _files(folder: Path) -> dict[Path, set[str]]:
    """Files to read, each with the tensors the index expects in it (none without an index)."""
    if (folder / _SINGLE_FILE).is_file():
        return {folder / _SINGLE_FILE: set()}
    index = folder / _INDEX_FILE
    if not index.is_file():
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".gguf"))
        hint = f" (found {', '.join(others[:3])}: convert it)" if others else ""
        raise CheckpointError(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}{hint}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} has no readable weight_map; fetch it again") from error
    files: dict[Path, set[str]] = {}
    for name, file in entries:
        if Path(file).name != file:
            raise CheckpointError(f"{index} names {file!r}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{index} names {file}, which is missing in {folder}")
        files.setdefault(folder / file, set()).add(name)
    return files


def _read_exactly(info: TensorInfo, name: str, out: torch.Tensor, offset: int) -> None:
    """Fill ``out`` from the file at ``offset``; a mapping would raise SIGBUS on a short file."""
    view = out.view(-1).view(torch.uint8).numpy().data
    try:
        descriptor = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"{info.path} is truncated inside tensor {name}")
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{info.path}: tensor {name} cannot be read: {error}") from error
