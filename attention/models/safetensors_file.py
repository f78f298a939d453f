"""Headers of safetensors files, read and checked without touching the data.

A header is 8 bytes of length, then JSON: name -> dtype, shape, data_offsets; data follows.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coterie.errors import CheckpointError

# No dtype here is read as a number of another one: what is not listed is refused.
ITEM_SIZES: Final = {"BF16": 2, "F16": 2, "F32": 4}
_MAX_HEADER_BYTES: Final = 100 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One entry of a header."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    end: int
    """One past the last byte, from the start of the file."""

    @property
    def is_supported(self) -> bool:
        return self.dtype in ITEM_SIZES


def read_header_bytes(path: Path) -> bytes:
    """The raw JSON of a header.

    Raises:
        CheckpointError: the file is missing, or too short for the header it announces.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is not a safetensors file or is truncated: {size} bytes, and its "
                    f"header claims {length}; fetch it again"
                )
            return file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Check and return the header of one file.

    Raises:
        CheckpointError: corrupt header, or data shorter than it says; names file and tensor.
    """
    raw = read_header_bytes(path)
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path} has a corrupt header: {error}; fetch it again") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a corrupt header: not a JSON object; fetch it again")
    base, size = 8 + len(raw), path.stat().st_size
    infos = {
        name: _tensor_info(path, name, entry, base)
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    _check_extents(path, infos, base, size)
    return infos


def _check_extents(path: Path, infos: dict[str, TensorInfo], base: int, size: int) -> None:
    """Tensors must follow each other without gap or overlap and fill the file exactly."""
    end = base
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != end:
            raise CheckpointError(
                f"{path} has a corrupt header: tensor {name} starts at byte {info.start} where "
                f"{end} was expected; fetch it again"
            )
        end = info.end
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {end}, the file at {size}; "
                "fetch it again"
            )
    if end != size:
        raise CheckpointError(
            f"{path} has {size} bytes where its header describes {end}; fetch it again"
        )


def _tensor_info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(n) for n in entry["shape"])
        first, last = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a corrupt header at tensor {name}; fetch it again"
        ) from error
    bad = first < 0 or last < first or any(n < 0 for n in shape)
    if dtype in ITEM_SIZES:
        bad = bad or last - first != math.prod(shape) * ITEM_SIZES[dtype]
    if bad:
        raise CheckpointError(
            f"{path} has a corrupt header: tensor {name} of dtype {dtype} and shape {list(shape)} "
            f"cannot take bytes {first} to {last}; fetch it again"
        )
    return TensorInfo(path=path, dtype=dtype, shape=shape, start=base + first, end=base + last)
