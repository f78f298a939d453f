"""Which seats a deployment gets, and what is refused. Pure, no processes."""

from typing import Any

import pytest

from coterie.attention.models.config import ModelConfig
from coterie.errors import ConfigError
from coterie.runtime.cluster.layout import resolve_layout
from coterie.runtime.config import ParallelConfig

DENSE = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 1e4,
    }
)
MOE = ModelConfig.from_dict(
    {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 1e4,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
)


def _layout(model: ModelConfig, num_cpus: int = 2, **flags: Any) -> tuple[Any, ...]:
    layout = resolve_layout(ParallelConfig(**flags), model, num_cpus)
    return layout.attention_seats, layout.expert_seats, layout.colocated


@pytest.mark.parametrize(
    ("flags", "num_cpus", "attention", "experts", "colocated"),
    [
        ({}, 2, (0, 1), (0, 1), True),
        ({}, 1, (0,), (0,), True),
        ({}, 64, (0, 1), (0, 1), True),
        ({"data_parallel_size": 3}, 2, (0, 1, 2), (0, 1, 2), True),
        ({"attention_ranks": 2, "expert_ranks": 2}, 2, (0, 1), (0, 1), True),
        ({"attention_ranks": 3}, 2, (0, 1, 2), (0, 1, 2), True),
        ({"expert_ranks": 1}, 2, (0,), (0,), True),
        ({"attention_ranks": 1, "expert_ranks": 2}, 2, (0,), (1, 2), False),
        ({"attention_ranks": 4, "expert_ranks": 1}, 2, (0, 1, 2, 3), (4,), False),
        ({"data_parallel_size": 2, "expert_ranks": 3}, 2, (0, 1), (2, 3, 4), False),
        ({"data_parallel_size": 2, "disaggregate": True}, 2, (0, 1), (2, 3), False),
        ({"disaggregate": True}, 1, (0,), (1,), False),
    ],
)
def test_moe_seats(
    flags: dict[str, Any],
    num_cpus: int,
    attention: tuple[int, ...],
    experts: tuple[int, ...],
    colocated: bool,
) -> None:
    assert _layout(MOE, num_cpus, **flags) == (attention, experts, colocated)


def test_roles_and_uneven_placement() -> None:
    """3 experts over seats 1 and 2: seat 1 holds experts 0 and 1, seat 2 holds expert 2."""
    layout = resolve_layout(ParallelConfig(attention_ranks=1, expert_ranks=2), MOE, 2)
    assert [layout.roles(seat) for seat in layout.seats] == [
        ("attention",),
        ("experts",),
        ("experts",),
    ]
    assert layout.placement is not None
    assert layout.placement.physical_to_seat == (1, 1, 2)


def test_redundant_experts_are_placed() -> None:
    layout = resolve_layout(ParallelConfig(num_redundant_experts=2), MOE, 2)
    assert layout.placement is not None
    assert layout.placement.num_physical == 5
    assert layout.describe()["num_physical_experts"] == 5


def test_layout_hash_tells_layouts_apart() -> None:
    flags: list[dict[str, Any]] = [
        {},
        {"data_parallel_size": 1},
        {"disaggregate": True},
        {"num_redundant_experts": 1},
    ]
    hashes = {resolve_layout(ParallelConfig(**f), MOE, 2).hash() for f in flags}
    assert len(hashes) == len(flags)


@pytest.mark.parametrize(
    ("flags", "num_cpus", "count"),
    [
        ({}, 2, 2),
        ({}, 1, 1),
        ({}, 64, 2),
        ({"data_parallel_size": 4}, 2, 4),
        ({"attention_ranks": 1}, 2, 1),
    ],
)
def test_dense_replicas(flags: dict[str, Any], num_cpus: int, count: int) -> None:
    assert _layout(DENSE, num_cpus, **flags) == (tuple(range(count)), (), True)


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        (MOE, {"tensor_parallel_size": 2}, "--tensor-parallel-size 2 is not available"),
        (DENSE, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not available"),
        (MOE, {"data_parallel_size": 2, "attention_ranks": 1}, "contradict"),
        (MOE, {"data_parallel_size": 0}, "at least 1"),
        (MOE, {"expert_ranks": 4}, "4 expert ranks for 3 experts"),
        (MOE, {"num_redundant_experts": 4}, "4 redundant experts do not fit"),
        (MOE, {"num_redundant_experts": -1}, "must not be negative"),
        (DENSE, {"expert_ranks": 1}, "--expert-ranks needs a mixture-of-experts model"),
        (DENSE, {"disaggregate": True}, "--disaggregate needs"),
        (DENSE, {"num_redundant_experts": 1}, "--num-redundant-experts needs"),
    ],
)
def test_refusals_say_what_to_change(model: ModelConfig, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _layout(model, **flags)
