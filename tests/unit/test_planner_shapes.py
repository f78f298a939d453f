"""ModelShape from config.json: agreement with the engine's own families, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.attention.models.config import ModelConfig
from coterie.attention.models.shapes import tensor_shapes
from coterie.errors import ConfigError, ModelError
from coterie.runtime.planner.device import PRESETS, device_from_dict, resolve_device
from coterie.runtime.planner.families import read_shape, shape_from_dict
from coterie.runtime.planner.layouts import Layout, enumerate_layouts, why_invalid
from coterie.runtime.planner.memory import make_ledger
from coterie.runtime.planner.stages import balance
from coterie.runtime.planner.workload import Cluster, Workload

SMOL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BIASED = SMOL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
MIXTRAL = SMOL | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = SMOL | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "mlp_only_layers": [0, 7],
    "decoder_sparse_step": 2,
}
GRANITE = SMOL | {
    "model_type": "granitemoe",
    "architectures": ["GraniteMoeForCausalLM"],
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "torch_dtype": "float32",
}
ENGINE_CONFIGS = (SMOL, BIASED, MIXTRAL, QWEN3_MOE, GRANITE)
WORK = Workload(context=1024, concurrency=4, reserve_bytes=1 << 29)


@pytest.mark.parametrize("values", ENGINE_CONFIGS, ids=lambda v: v["model_type"])
def test_weights_are_those_the_loader_reads(values: dict[str, Any]) -> None:
    config, shape = ModelConfig.from_dict(values), shape_from_dict(values)
    tensors = tensor_shapes(config)
    numel = sum(math.prod(dims) for dims in tensors.values())
    assert shape.num_parameters == numel
    cluster = Cluster(device=PRESETS["h100"], devices_per_node=1)
    layout = Layout(tp=1, expert_ranks=int(shape.is_moe))
    ledger = make_ledger(shape, layout, cluster, WORK)
    assert ledger.weights == numel * config.dtype.itemsize
    assert "weights_kv_copies" not in ledger.lines


@pytest.mark.parametrize("values", ENGINE_CONFIGS, ids=lambda v: v["model_type"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_is_that_of_the_cache(values: dict[str, Any], dtype: torch.dtype) -> None:
    shape = shape_from_dict(values, dtype=str(dtype).removeprefix("torch."))
    assert shape.kv_bytes_per_token == ModelConfig.from_dict(values).kv_bytes_per_token(dtype)


def test_uneven_heads_follow_kv_groups() -> None:
    attention = shape_from_dict(SMOL).attention
    assert (attention.heads_per_rank(2), attention.kv_heads_per_rank(2)) == (6, 2)
    assert (attention.heads_per_rank(3), attention.kv_heads_per_rank(3)) == (3, 1)
    assert (attention.heads_per_rank(9), attention.kv_heads_per_rank(9)) == (1, 1)
    assert attention.heads_per_rank(4) == 3
    assert not attention.is_even(2)
    assert attention.is_even(9)


def test_experts_are_dealt_out() -> None:
    shape = shape_from_dict(MIXTRAL)
    cluster = Cluster(device=PRESETS["h100"], devices_per_node=8)

    def experts(layout: Layout) -> int:
        return make_ledger(shape, layout, cluster, WORK).lines["weights_experts"]

    whole = experts(Layout(tp=1, expert_ranks=1))
    assert experts(Layout(tp=1, dp=4, ep=4, expert_ranks=4)) == whole // 4
    assert experts(Layout(tp=1, dp=4, ep=2, expert_shards=2, expert_ranks=4)) == whole // 4
    # Three ranks, eight experts: the fullest has three.
    assert experts(Layout(tp=1, dp=3, ep=3, expert_ranks=3)) == whole * 3 // 8
    apart = Layout(tp=1, dp=2, ep=2, expert_ranks=2, disaggregated=True)
    ledger = make_ledger(shape, apart, cluster, WORK)
    assert "weights_experts" not in ledger.lines
    assert ledger.expert_lines["weights_experts"] == whole // 2


def test_stages_balance_bytes() -> None:
    assert balance([1] * 80, 0, 0, 2) == [(0, 40), (40, 80)]
    assert balance([10] * 6, 10, 10, 2) == [(0, 3), (3, 6)]
    assert balance([10] * 6, 0, 25, 2) == [(0, 4), (4, 6)]
    assert balance([1, 1, 1], 0, 0, 3) == [(0, 1), (1, 2), (2, 3)]
    assert len(balance([1] * 7, 100, 0, 4)) == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "exceeds"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
    ],
)
def test_refusals(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        shape_from_dict(SMOL | changes)


def test_unknown_families_are_read_by_their_keys() -> None:
    shape = shape_from_dict(SMOL | {"model_type": "novel"})
    assert not shape.known_family
    assert "'novel'" in shape.assumptions[0]
    assert shape.num_parameters == shape_from_dict(SMOL).num_parameters
    wrapped = shape_from_dict({"model_type": "seeing", "text_config": SMOL})
    assert wrapped.num_parameters == shape.num_parameters
    assert "images" in wrapped.assumptions[0]


def test_int4_with_group_scales_and_ignored_modules() -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    shape = shape_from_dict(SMOL | {"quantization_config": quantization})
    (kind,) = shape.kinds
    size = {w.part: w.num_bytes for w in kind.weights if w.matrix}
    assert size["mlp"] == 3 * 576 * 1536 * 9 // 16
    plain = {w.part: w.num_bytes for w in shape_from_dict(SMOL).kinds[0].weights if w.matrix}
    assert size["attention"] == plain["attention"]
    assert shape_from_dict(SMOL | {"quantization_config": quantization}, dtype="float8").dtype == (
        "bfloat16"
    )


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    assert read_shape(tmp_path) == read_shape(tmp_path / "config.json")
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(ModelError, match="JSON object"):
        read_shape(tmp_path / "bad.json")
    with pytest.raises(ModelError, match="cannot be read"):
        read_shape(tmp_path / "none.json")


def test_why_a_model_cannot_be_cut() -> None:
    shape = shape_from_dict(MIXTRAL)
    assert why_invalid(shape, Layout(tp=2, expert_shards=2, expert_ranks=2)) is None
    for layout, nearest in (
        (Layout(tp=10, expert_shards=10, expert_ranks=10), "nearest valid size is 9"),
        (Layout(tp=1, pp=31, expert_ranks=31), "nearest valid size is 30"),
        (Layout(tp=1, dp=9, ep=9, expert_ranks=9), "nearest valid size is 8"),
        (Layout(tp=5, expert_shards=5, expert_ranks=5), "nearest valid sizes are 4 and 6"),
    ):
        assert nearest in (why_invalid(shape, layout) or "")


def test_layouts_use_all_devices_or_one_replica() -> None:
    shape = shape_from_dict(MIXTRAL)
    layouts = enumerate_layouts(shape, 6)
    assert len(layouts) == len(set(layouts))
    assert all(x.world_size <= 6 for x in layouts)
    labels = {x.label() for x in layouts}
    assert {"DP6 + EP6", "TP6 + EP6", "TP3 x DP2 + EP6", "PP2 x DP3 + EP3"} <= labels
    assert {"3A:3E", "DP6 + EP3 + 2 shards", "DP6", "TP2 x PP3 + EP2", "1 rank"} <= labels


def test_device_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: a100\nmemory_bytes: 40e9\nlink_domain: 4\nflops: {bfloat16: 1.0e+14}\n")
    device = resolve_device(str(path), 4)
    assert (device.name, device.memory_bytes, device.link_domain) == ("mine", 40 * 10**9, 4)
    assert device.flops_for("float8") == device.flops_for("bfloat16") == 1e14
    assert device.bandwidth == PRESETS["a100"].bandwidth
    assert resolve_device("cpu", 2).memory_bytes > 0
    for values, expected in (
        ({}, "memory_bytes is missing"),
        ({"memory_bytes": "much"}, "positive number"),
        ({"memory_bytes": 1, "memroy": 2}, "unknown memroy"),
        ({"memory_bytes": 1, "base": "z9"}, "z9"),
        ({"memory_bytes": 1, "kind": "tpu"}, "kind"),
        ({"memory_bytes": 1, "overlaps": 3}, "overlaps"),
    ):
        with pytest.raises(ConfigError, match=expected):
            device_from_dict(values, name="x")
    for name, expected in (("z9", "no device"), (str(tmp_path / "no.yaml"), "cannot be read")):
        with pytest.raises(ConfigError, match=expected):
            resolve_device(name, 1)
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold keys"):
        resolve_device(str(path), 1)
