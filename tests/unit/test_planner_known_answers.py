"""The planner against public arithmetic: sizes of published models, what fits, what is sent."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.runtime.api import cli
from coterie.runtime.planner.communication import decode_ledger
from coterie.runtime.planner.device import PRESETS, device_from_dict
from coterie.runtime.planner.families import shape_from_dict
from coterie.runtime.planner.layouts import Layout
from coterie.runtime.planner.memory import Ledger, make_ledger
from coterie.runtime.planner.roofline import bubble, estimate
from coterie.runtime.planner.workload import Cluster, Workload

GIB, MIB = 1 << 30, 1 << 20
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LLAMA_405B = LLAMA_70B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
}
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "sliding_window": 128,
    "vocab_size": 201088,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
CARD = device_from_dict({"memory_bytes": 80e9}, name="card")


def ledger_70b(layout: Layout, num_parameters: int | None) -> Ledger:
    devices = layout.world_size
    return make_ledger(
        shape_from_dict(LLAMA_70B),
        layout,
        Cluster(device=CARD, devices_per_node=devices),
        Workload(
            context=32768,
            concurrency=64,
            memory_utilization=0.9,
            reserve_bytes=4 * GIB,
            num_parameters=num_parameters,
        ),
    )


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        (LLAMA_70B, 70_553_706_496),
        (LLAMA_405B, 405_853_388_800),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_235B, 235_093_634_560),
        # With 256 and 384 correction biases in each of 58 and 60 MoE layers.
        (DEEPSEEK_V3, 671_026_404_352 + 58 * 256),
        (KIMI_K2, 1_026_408_209_408 + 60 * 384),
        (GPT_OSS_120B, 116_829_156_672),
    ],
    ids=lambda v: v["model_type"] if isinstance(v, dict) else "",
)
def test_parameter_counts(values: dict[str, Any], parameters: int) -> None:
    assert shape_from_dict(values).num_parameters == parameters


@pytest.mark.parametrize(
    ("layout", "kv_tokens", "requests"),
    [
        (Layout(tp=4), 395_569, 12),
        (Layout(tp=8), 1_222_046, 37),
        (Layout(tp=16), 1_437_500, 43),
        (Layout(tp=8, pp=2), 2_875_001, 87),
        (Layout(tp=4, pp=2), 1_222_046, 37),
        (Layout(tp=1), 0, 0),
        (Layout(tp=2), 0, 0),
    ],
    ids=lambda v: v.label() if isinstance(v, Layout) else "",
)
def test_llama_70b_split_evenly(layout: Layout, kv_tokens: int, requests: int) -> None:
    ledger = ledger_70b(layout, 70_600_000_000)
    assert ledger.kv_tokens == kv_tokens
    assert ledger.kv_tokens // 32768 == requests
    held = sum(v for k, v in ledger.lines.items() if k not in ("kv_per_token", "budget"))
    if kv_tokens:
        assert ledger.lines["budget"] - ledger.lines["kv_per_token"] < held
        assert held <= ledger.lines["budget"] == 72 * 10**9
    else:
        assert ledger.shortfall > 0


def test_llama_70b_weights_and_kv_a_card() -> None:
    ledger = ledger_70b(Layout(tp=4), 70_600_000_000)
    assert ledger.weights / GIB == pytest.approx(32.9, abs=0.05)
    assert ledger.lines["kv_per_token"] == 80 * 1024
    assert ledger_70b(Layout(tp=8), None).lines["kv_per_token"] == 40 * 1024
    # Beyond 8 KV heads the KV of a card shrinks no further.
    assert ledger_70b(Layout(tp=16), None).lines["kv_per_token"] == 40 * 1024
    assert shape_from_dict(LLAMA_70B).kv_bytes_per_token * 32768 == 10 * GIB


@pytest.mark.parametrize(("tp", "kv_tokens"), [(4, 395_851), (8, 1_222_329), (16, 1_437_642)])
def test_llama_70b_from_the_config_alone(tp: int, kv_tokens: int) -> None:
    assert ledger_70b(Layout(tp=tp), None).kv_tokens == pytest.approx(kv_tokens, rel=1e-3)


def test_tp_beyond_kv_heads_says_what_the_copies_cost() -> None:
    assert "weights_kv_copies" not in ledger_70b(Layout(tp=8), None).lines
    projections = 80 * 2 * 8192 * 1024 * 2
    copies = ledger_70b(Layout(tp=16), None).lines["weights_kv_copies"]
    assert copies == pytest.approx(projections / 8 - projections / 16, rel=1e-3)


def test_tp4_sends_240_mib_a_step() -> None:
    cluster = Cluster(device=PRESETS["h100"], devices_per_node=4)
    sent: Any = decode_ledger(shape_from_dict(LLAMA_70B), Layout(tp=4), cluster, 64)
    tp = sent["tp"]
    assert (tp["calls"], tp["message_bytes"]) == (160, MIB)
    assert tp["bytes"] == tp["link_bytes"] == 240 * MIB == sent["bytes"]
    assert tp["transfer_ms"] == pytest.approx(0.56, abs=0.005)
    assert sent["by_link"] == {"link": 240 * MIB, "network": 0}
    assert sent["dp"]["calls"] == sent["dp"]["bytes"] == 0


def test_micro_batches_send_messages_of_their_own() -> None:
    cluster = Cluster(device=PRESETS["h100"], devices_per_node=8)
    sent: Any = decode_ledger(shape_from_dict(LLAMA_70B), Layout(tp=4, pp=2), cluster, 64)
    assert (sent["tp"]["calls"], sent["tp"]["message_bytes"]) == (160, MIB // 2)
    assert sent["tp"]["bytes"] == 120 * MIB
    assert (sent["pp"]["calls"], sent["pp"]["bytes"]) == (2, MIB)


def test_weights_of_141_gb_take_42_ms() -> None:
    work = Workload(context=1, concurrency=1, reserve_bytes=0, num_parameters=70_600_000_000)
    cluster = Cluster(device=PRESETS["h100"], devices_per_node=1)
    made = estimate(shape_from_dict(LLAMA_70B), Layout(tp=1), cluster, work, 1)
    assert made.weights_ms == pytest.approx(42, abs=0.2)
    assert made.tpot_ms >= made.weights_ms


def test_latent_kv_is_70_kb() -> None:
    shape = shape_from_dict(DEEPSEEK_V3)
    assert shape.kv_bytes_per_token == 61 * 576 * 2 == 70_272
    # Every rank of a TP group has a full copy.
    assert shape.kv_bytes_per_token_layer(8) == shape.kv_bytes_per_token_layer(1)


def test_deepseek_v3_dispatch_bytes() -> None:
    shape = shape_from_dict(DEEPSEEK_V3, dtype="bfloat16")
    cluster = Cluster(device=PRESETS["h200"], devices_per_node=8, nodes=8)
    layout = Layout(tp=1, dp=64, ep=64, expert_ranks=64)
    sent: Any = decode_ledger(shape, layout, cluster, 1)
    ep = sent["ep"]
    assert ep["bytes_per_token_per_layer_without_deduplication"] == 8 * 7168 * 2 * 2 == 229_376
    assert ep["bytes_per_token_per_layer"] < 229_376
    assert ep["calls"] == 2 * 58
    assert ep["bytes"] == pytest.approx(58 * ep["bytes_per_token_per_layer"], rel=1e-4)
    assert ep["network_bytes"] > ep["link_bytes"] > 0


def test_deduplication_counts_ranks_not_experts() -> None:
    shape = shape_from_dict(MIXTRAL_8X7B)
    cluster = Cluster(device=PRESETS["h100"], devices_per_node=8)
    sent: Any = decode_ledger(shape, Layout(tp=1, dp=2, ep=2, expert_ranks=2), cluster, 10)
    # Two of 8 experts: both on one side with 3/7, so the other rank gets 1 - 3/14 of the tokens.
    assert sent["ep"]["remote_destinations"] == pytest.approx(1 - 3 / 14)
    apart: Any = decode_ledger(
        shape,
        Layout(tp=1, dp=1, ep=2, expert_ranks=2, disaggregated=True),
        cluster,
        10,
    )
    assert apart["ep"]["remote_destinations"] == pytest.approx(2 - 3 / 7)


def test_pipeline_bubbles() -> None:
    assert bubble(4, 4) == pytest.approx(0.43, abs=0.005)
    assert bubble(4, 32) == pytest.approx(0.09, abs=0.005)
    assert bubble(1, 7) == 0


def test_quantized_checkpoints_count_what_is_stored() -> None:
    fp8, bf16 = shape_from_dict(DEEPSEEK_V3), shape_from_dict(DEEPSEEK_V3, dtype="bfloat16")
    assert (fp8.weights_dtype, fp8.dtype, bf16.weights_dtype) == ("float8", "bfloat16", "bfloat16")
    assert bf16.num_weight_bytes == 2 * bf16.num_parameters
    # Embedding, head, gates and norms stay in 16 bits; block scales add 1/4096.
    assert 671e9 < fp8.num_weight_bytes < 674e9
    oss = shape_from_dict(GPT_OSS_120B)
    # 4.25 bits an expert weight: the published checkpoint is 65 GB.
    assert oss.weights_dtype == "mxfp4"
    assert oss.num_weight_bytes == pytest.approx(65.2e9, rel=0.01)


def test_the_command_gives_the_known_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, card = tmp_path / "llama-70b.json", tmp_path / "card.yaml"
    config.write_text(json.dumps(LLAMA_70B))
    # YAML 1.1 takes 80e9, without a dot, for a string.
    card.write_text("memory_bytes: 80e9\n")
    code = cli.main(
        [
            *("plan", str(config), "--devices", "8", "--nodes", "2", "--device", str(card)),
            *("--context", "32768", "--concurrency", "64", "--memory-utilization", "0.9"),
            *("--reserve-gib", "4", "--num-parameters", "70.6e9", "--json"),
        ]
    )
    assert code == 0
    found = {
        (entry["layout"]["tp"], entry["layout"]["pp"]): (entry["kv_tokens"], entry["requests"])
        for entry in json.loads(capsys.readouterr().out)["layouts"]
    }
    assert found[4, 1] == (395_569, 12)
    assert found[8, 1] == (1_222_046, 37)
    assert found[16, 1] == (1_437_500, 43)
    assert found[8, 2] == (2_875_001, 87)
    assert found[4, 2] == (1_222_046, 37)
    assert found[1, 1] == found[2, 1] == (0, 0)
