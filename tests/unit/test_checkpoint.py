"""Checkpoints: what is read, what is refused before any rank starts, and dummy weights."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coterie.attention.models.checkpoint import (
    Checkpoint,
    DummyCheckpoint,
    model_hash,
    open_weights,
)
from coterie.attention.models.config import ModelConfig
from coterie.attention.models.shapes import tensor_shapes
from coterie.errors import CheckpointError, ModelError

FAMILIES = ("llama", "mixtral", "qwen3_moe", "granite_moe")
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A private copy of a tiny Llama that a test may break."""
    return Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "model"))


def open_and_validate(folder: Path) -> None:
    Checkpoint.open(folder).validate(ModelConfig.from_hf(folder))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Save model.safetensors again after ``change``."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header and keep the data as it is."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def shard(folder: Path) -> Path:
    """Split into two files with an index; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_match_what_transformers_writes(
    family: str, tiny_model_dir: Callable[..., Path]
) -> None:
    """No tensor of the file is left unread and none is missing."""
    model_dir = tiny_model_dir(family)
    written = load_file(model_dir / "model.safetensors")
    expected = {name: tuple(tensor.shape) for name, tensor in written.items()}
    assert tensor_shapes(ModelConfig.from_hf(model_dir)) == expected
    open_and_validate(model_dir)


def test_reads_equal_safetensors(tiny_model_dir: Callable[..., Path]) -> None:
    model_dir = tiny_model_dir("granite_moe", dtype="bfloat16")
    checkpoint = Checkpoint.open(model_dir)
    for name, expected in load_file(model_dir / "model.safetensors").items():
        assert torch.equal(checkpoint.read(name, torch.bfloat16), expected)
        assert torch.equal(checkpoint.read(name, torch.float32), expected.float())
        rows = checkpoint.read_rows(name, 1, 3, torch.bfloat16)
        assert rows.is_contiguous()
        assert torch.equal(rows, expected[1:3])


def test_float16_is_converted(folder: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN_PROJ] = tensors[DOWN_PROJ].half()

    rewrite(folder, halve)
    open_and_validate(folder)
    read = Checkpoint.open(folder).read(DOWN_PROJ, torch.bfloat16)
    expected = load_file(folder / "model.safetensors")[DOWN_PROJ]
    assert torch.equal(read, expected.to(torch.bfloat16))


def test_sharded_equals_single(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    shard(folder)
    open_and_validate(folder)
    checkpoint = Checkpoint.open(folder)
    assert all(torch.equal(checkpoint.read(n, torch.float32), t) for n, t in expected.items())


def test_truncated_file_names_file_and_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor model\."):
        open_and_validate(folder)


def test_file_that_ends_in_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    for content in (b"", b"abc", path.read_bytes()[:50]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a safetensors file or is truncated"):
            open_and_validate(folder)


def test_trailing_bytes(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="bytes where its header describes"):
        open_and_validate(folder)


@pytest.mark.parametrize("text", [b"{not json", b"[1]", b"\xff\xfe{}"])
def test_corrupt_header(folder: Path, text: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="corrupt header"):
        open_and_validate(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"dtype": "F32", "shape": [64, 96], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": "wide", "data_offsets": [0]},
    ],
    ids=["empty", "size", "overlap", "negative", "types"],
)
def test_corrupt_entry_names_a_tensor(folder: Path, entry: dict[str, Any]) -> None:
    edit_header(folder, lambda header: header.update({DOWN_PROJ: entry}))
    with pytest.raises(CheckpointError, match="corrupt header.*tensor"):
        open_and_validate(folder)


def test_missing_tensors(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(DOWN_PROJ))
    with pytest.raises(CheckpointError, match=f"lacks tensor {DOWN_PROJ}, needed by Llama"):
        open_and_validate(folder)
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match="and 1 more"):
        open_and_validate(folder)


def test_missing_head_hints_at_tying(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="set tie_word_embeddings"):
        open_and_validate(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    open_and_validate(folder)


def test_wrong_shape_and_dtype(folder: Path) -> None:
    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN_PROJ] = tensors[DOWN_PROJ].t().contiguous()

    rewrite(folder, transpose)
    with pytest.raises(CheckpointError, match=r"has shape \[96, 64\].*asks for \[64, 96\]"):
        open_and_validate(folder)

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN_PROJ] = torch.zeros(64, 96, dtype=torch.int8)

    rewrite(folder, quantize)
    with pytest.raises(CheckpointError, match="has dtype I8; supported: BF16, F16, F32"):
        open_and_validate(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors.*pytorch_model\.bin"):
        open_and_validate(folder)


def test_index_names_what_is_not_there(folder: Path) -> None:
    index = shard(folder)
    original = json.loads(index.read_text())
    (folder / "model-00002-of-00002.safetensors").rename(folder / "away")
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002\.safetensors.*missing"):
        open_and_validate(folder)
    (folder / "away").rename(folder / "model-00002-of-00002.safetensors")

    for weight_map, message in (
        ({"extra.weight": "model-00001-of-00002.safetensors"}, "places tensor extra.weight in"),
        ({"extra.weight": "../model-00001-of-00002.safetensors"}, "not a file of this folder"),
    ):
        index.write_text(json.dumps({"weight_map": original["weight_map"] | weight_map}))
        with pytest.raises(CheckpointError, match=message):
            open_and_validate(folder)

    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="no readable weight_map"):
            open_and_validate(folder)


def test_file_cut_after_validation(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="truncated inside tensor model.norm.weight"):
        checkpoint.read("model.norm.weight", torch.float32)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight cannot be read"):
        checkpoint.read("model.norm.weight", torch.float32)
    with pytest.raises(CheckpointError, match="no readable tensor nothing"):
        checkpoint.read("nothing", torch.float32)


def test_model_hash_follows_config_and_headers(folder: Path) -> None:
    first = model_hash(folder)
    assert first == model_hash(str(folder))
    rewrite(folder, lambda tensors: tensors.pop(DOWN_PROJ))
    changed = model_hash(folder)
    assert changed != first
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert model_hash(folder) != changed
    (folder / "model.safetensors").unlink()
    assert len(model_hash(folder, "dummy")) == 64
    config.unlink()
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        model_hash(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_depend_on_seed_name_and_shape_only(
    family: str, tiny_model_dir: Callable[..., Path]
) -> None:
    config = ModelConfig.from_hf(tiny_model_dir(family))
    first, second = DummyCheckpoint(config, 1), open_weights("nowhere", config, "dummy", 1)
    other = DummyCheckpoint(config, 2)
    second.validate(config)
    for name, shape in tensor_shapes(config).items():
        tensor = first.read(name, torch.float32)
        assert tensor.shape == shape
        # Read in another order and by rows: the same numbers.
        assert torch.equal(second.read_rows(name, 1, 3, torch.float32), tensor[1:3])
        assert torch.equal(second.read(name, torch.bfloat16), tensor.to(torch.bfloat16))
        if "norm" in name:
            assert torch.equal(tensor, torch.ones(shape))
        else:
            assert not torch.equal(tensor, other.read(name, torch.float32))
            assert 0.015 < tensor.std() < 0.025
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        first.read("nothing", torch.float32)
