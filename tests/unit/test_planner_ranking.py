"""Which layout the planner puts first, by the known rules; the report and its JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.runtime.api import cli
from coterie.runtime.planner.device import PRESETS, resolve_device
from coterie.runtime.planner.families import shape_from_dict
from coterie.runtime.planner.plan import Plan, PlannedLayout, plan
from coterie.runtime.planner.workload import Cluster, Workload

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_405B = DENSE | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
LATENT = DENSE | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
SMALL_MOE = {
    "model_type": "granitemoe",
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "vocab_size": 49155,
    "tie_word_embeddings": True,
}
ISSUED_FIELDS = [
    *("layout", "fits", "kv_tokens", "requests", "memory", "communication", "estimates", "reason")
]
LAYOUT_FIELDS = {
    *("tp", "pp", "dp", "ep", "attention_ranks", "expert_ranks", "expert_shards", "disaggregated")
}


def planned(
    values: dict[str, Any],
    device: str = "h100",
    devices: int = 8,
    nodes: int = 1,
    context: int = 4096,
    concurrency: int = 64,
    dtype: str = "auto",
    **targets: float,
) -> Plan:
    found = resolve_device(device, devices)
    return plan(
        shape_from_dict(values, dtype=dtype),
        Cluster(device=found, devices_per_node=devices, nodes=nodes),
        Workload(
            context=context,
            concurrency=concurrency,
            reserve_bytes=found.reserve_bytes,
            slo_ttft_s=targets.get("ttft"),
            slo_tpot_ms=targets.get("tpot"),
        ),
    )


def best(made: Plan) -> PlannedLayout:
    assert made.layouts[0].fits
    return made.layouts[0]


def test_one_card_fits_means_replicas() -> None:
    first = best(planned(DENSE))
    assert first.layout.label() == "DP8"
    assert first.reason.startswith("one card holds the model")
    assert best(planned(SMALL_MOE)).layout.label() == "DP8"


def test_too_few_requests_for_replicas_split_the_model() -> None:
    assert best(planned(DENSE, concurrency=1)).layout.tp > 1


def test_tp_stays_inside_the_domain_and_stages_cross() -> None:
    made = planned(LLAMA_405B, nodes=2, context=8192)
    assert best(made).layout.label() == "TP8 x PP2"
    (wide,) = [p for p in made.layouts if p.layout.tp == 16]
    assert wide.fits
    assert "domain of 8" in wide.reason
    assert made.layouts.index(wide) > max(
        i for i, p in enumerate(made.layouts) if p.fits and p.layout.tp < 16
    )


def test_fewer_cards_per_replica_when_they_hold_enough() -> None:
    values = DENSE | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    first = best(planned(values | {"num_attention_heads": 64}, device="h200"))
    assert first.layout.label() == "TP2 x DP4"


def test_stages_when_heads_do_not_divide() -> None:
    values = LLAMA_405B | {
        "num_attention_heads": 70,
        "num_key_value_heads": 7,
        "head_dim": 128,
        "hidden_size": 8192,
        "num_hidden_layers": 96,
        "intermediate_size": 32768,
    }
    made = planned(values, device="h100", devices=4)
    assert best(made).layout.tp == 1
    assert best(made).layout.pp == 4
    uneven = next(p for p in made.layouts if p.layout.tp == 4 and p.fits)
    assert "do not divide evenly" in uneven.reason


def test_latent_attention_is_data_parallel() -> None:
    first = best(planned(LATENT, device="h200", nodes=2, dtype="float8", concurrency=128))
    assert (first.layout.tp, first.layout.dp, first.layout.ep) == (1, 16, 16)
    assert "latent" in first.reason


@pytest.mark.parametrize("concurrency", [16, 64, 128])
def test_tp_with_experts_for_few_requests(concurrency: int) -> None:
    first = best(planned(MOE, device="h200", concurrency=concurrency))
    assert first.layout.label() == "TP8 + EP8"


@pytest.mark.parametrize("concurrency", [512, 2048])
def test_dp_with_experts_for_many_requests(concurrency: int) -> None:
    first = best(planned(MOE, device="h200", concurrency=concurrency, context=1024))
    assert first.layout.label() == "DP8 + EP8"


def test_between_them_estimates_decide() -> None:
    for concurrency in (256, 400):
        made = planned(MOE, device="h200", concurrency=concurrency, context=1024)
        assert best(made).layout.ep == 8
        rivals = [p for p in made.layouts if p.layout.ep == 8 and not p.layout.disaggregated]
        assert rivals[0].estimates is not None
        assert rivals[0].estimates.tokens_per_s == max(
            p.estimates.tokens_per_s for p in rivals if p.estimates and p.layout.pp == 1
        )


def test_ultra_sparse_models_keep_experts_together_on_few_cards() -> None:
    sparse = MOE | {"num_experts_per_tok": 1}
    first = best(planned(sparse, device="h200"))
    assert (first.layout.ep, first.layout.tp) == (1, 8)
    assert "0.78 %" in first.reason
    assert best(planned(sparse, device="h200", nodes=2)).layout.ep > 1


def test_targets_come_before_rules() -> None:
    free, bound = planned(DENSE), planned(DENSE, tpot=4.0)
    assert best(free).layout.tp == 1
    assert best(bound).layout.tp > 1
    (replicas,) = [p for p in bound.layouts if p.layout.label() == "DP8"]
    assert replicas.reason.startswith("misses the target: TPOT")
    assert best(planned(DENSE, ttft=0.03)).layout.tp > 1


def test_what_does_not_fit_says_by_how_much() -> None:
    made = planned(LLAMA_405B)
    assert not made.layouts[0].fits
    assert "GiB a rank are missing" in made.layouts[0].reason
    assert "weights_mlp" in made.layouts[0].reason
    short = planned(DENSE, devices=1, context=10_000_000)
    assert "less than one request" in short.layouts[0].reason


def test_what_this_version_refuses_is_planned_and_said() -> None:
    made = planned(SMALL_MOE, device="cpu", devices=2, context=256, concurrency=16)
    notes = {p.layout.label(): p.runnable_note for p in made.layouts}
    assert notes["DP2 + EP2"] == notes["1A:1E"] == notes["1 rank"] == ""
    assert notes["TP2 + EP2"] == "this version refuses: tensor parallelism"
    assert "pipeline" in notes["PP2"]
    assert "expert shards" in notes["DP2 + 2 shards"]
    assert "GPU" not in notes["PP2"]
    assert "devices other than CPUs" in planned(LATENT).layouts[0].runnable_note
    assert "deepseek_v3" in planned(LATENT).layouts[0].runnable_note


def test_cpu_estimates_are_near_what_was_measured() -> None:
    # coterie bench with random weights of this shape, 2 ranks on 2 cores of a server with AVX-512,
    # prompts of 224 and answers of 40 tokens: median time between tokens at these concurrencies.
    for concurrency, measured_ms in ((2, 93), (16, 238)):
        made = planned(SMALL_MOE, device="cpu", devices=2, context=264, concurrency=concurrency)
        (found,) = [p for p in made.layouts if p.layout.label() == "DP2 + EP2"]
        assert found.estimates is not None
        assert found.estimates.tpot_ms == pytest.approx(measured_ms, rel=0.3)


def test_pipelines_hide_all_but_the_bubble() -> None:
    made = planned(DENSE, devices=4, context=2048 * 32)
    (stages,) = [p for p in made.layouts if (p.layout.pp, p.layout.tp, p.layout.dp) == (4, 1, 1)]
    single = next(p for p in made.layouts if p.layout.world_size == 1)
    assert stages.estimates is not None
    assert single.estimates is not None
    assert stages.estimates.pipeline_bubble == pytest.approx(3 / 35)
    assert single.estimates.ttft_s / stages.estimates.ttft_s == pytest.approx(4 * 32 / 35, rel=0.05)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    code, out, err = run(capsys, str(tmp_path), "--device", "h200", "--devices", "4", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert next(iter(report)) == "layouts"
    entries = report["layouts"]
    assert len(entries) > 20
    for entry in entries:
        assert list(entry)[:8] == ISSUED_FIELDS
        assert set(entry["layout"]) == LAYOUT_FIELDS
        assert isinstance(entry["layout"]["disaggregated"], bool)
        assert isinstance(entry["fits"], bool)
        assert isinstance(entry["kv_tokens"], int)
        assert isinstance(entry["requests"], int)
        assert all(isinstance(size, int) for size in entry["memory"].values())
        assert entry["reason"]
        assert isinstance(entry["runnable"], bool)
        assert entry["runnable"] == (entry["runnable_note"] == "")
        assert entry["fits"] == (entry["requests"] > 0)
    fits = [entry["fits"] for entry in entries]
    assert fits == sorted(fits, reverse=True)
    assert {entry["layout"]["disaggregated"] for entry in entries} == {True, False}
    assert report["model"]["num_parameters"] == shape_from_dict(MOE).num_parameters
    assert report["assumptions"]


def test_memory_lines_stay_within_the_budget() -> None:
    for entry in planned(MOE, device="b200", nodes=2).describe()["layouts"]:
        memory = dict(entry["memory"])
        if not entry["fits"]:
            continue
        budget, kv = memory.pop("budget"), memory.pop("kv_per_token")
        assert budget - kv < sum(memory.values()) <= budget == round(0.9 * 180 * 10**9)
        assert memory["kv_cache"] == entry["kv_tokens"] * kv
        assert {"weights_attention", "workspace", "graphs", "reserve"} <= set(memory)
        routed = entry["layout"]["ep"] > 1 or entry["layout"]["disaggregated"]
        assert not routed or memory["dispatch_buffers"] > 0


def test_report_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny-llama.json"
    config.write_text(json.dumps(DENSE))
    code, out, err = run(capsys, str(config), "--devices", "2", "--concurrency", "8")
    assert (code, err) == (0, "")
    for text in ("tiny-llama (llama): 8.03 billion", "DP2", "weights_mlp", "kv_cache", "budget"):
        assert text in out
    assert "this version refuses: devices other than CPUs" in out
    assert "roofline" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("nowhere.json",), "nowhere.json"),
        (("gpt-99",), "gpt-99"),
        (("{config}", "--device", "z9"), "z9"),
        (("{config}", "--devices", "0"), "--devices"),
        (("{config}", "--context", "-1"), "--context"),
        (("{config}", "--concurrency", "0"), "--concurrency"),
        (("{config}", "--memory-utilization", "1.5"), "--memory-utilization"),
        (("{config}", "--reserve-gib", "-1"), "--reserve-gib"),
        (("{config}", "--num-parameters", "-1"), "--num-parameters"),
        (("{config}", "--slo-tpot", "0"), "--slo-tpot"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(DENSE))
    code, out, err = run(capsys, *(arg.format(config=config) for arg in argv))
    assert (code, out) == (2, "")
    assert err.startswith("coterie: error: ")
    assert says in err
    assert err.count("\n") == 1


def test_presets_are_complete() -> None:
    assert set(PRESETS) == {"a100", "h100", "h200", "b200", "cpu"}
    assert PRESETS["h100"].bandwidth == 3.35e12
    assert PRESETS["h100"].link_bandwidth == 450e9
