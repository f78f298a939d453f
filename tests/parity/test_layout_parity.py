"""Every layout gives the greedy tokens of transformers, whole or chunked, prefix hit or not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie import LLM, SamplingParams

NUM_TOKENS = 64
PROMPT_LENS = (1, 7, 40, 75)

# Odd on purpose: head_dim apart from hidden / heads, one KV head, top_k 1 and all, tied and not,
# biases, an expert count that no pair of ranks can halve.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-3-experts": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 24},
    ),
    "mixtral-top1-tied-1kv": (
        "mixtral",
        {"num_experts_per_tok": 1, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3-all-experts-bias": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 5, "attention_bias": True, "head_dim": 40},
    ),
    "granite": ("granite_moe", {"num_local_experts": 5, "tie_word_embeddings": True}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"data_parallel_size": 1},
    "2-colocated": {"data_parallel_size": 2},
    "1A+2E": {"attention_ranks": 1, "expert_ranks": 2},
    "2A+1E": {"attention_ranks": 2, "expert_ranks": 1},
}


def make_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        for length in PROMPT_LENS
    ]


@pytest.fixture(scope="module")
def expected(hf_model: Callable[[Path], Any]) -> Callable[[Path], list[list[int]]]:
    """Greedy continuations by transformers in float32, one prompt at a time. Cached."""
    cache: dict[Path, list[list[int]]] = {}

    def generate(model_dir: Path) -> list[list[int]]:
        if model_dir not in cache:
            model = hf_model(model_dir)
            model.generation_config.eos_token_id = None
            outputs = []
            for prompt in make_prompts(model.config.vocab_size - 5):
                ids = torch.tensor([prompt])
                full = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NUM_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                )
                outputs.append(full[0, len(prompt) :].tolist())
            cache[model_dir] = outputs
        return cache[model_dir]

    return generate


def greedy(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Output tokens and cached prompt tokens per prompt."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    return tokens, [result.num_cached_tokens for result in results]


def check(model_dir: Path, layout: dict[str, Any], want: list[list[int]]) -> None:
    prompts = make_prompts(256)
    # 24 rows a step cut the longer prompts into chunks; blocks of 16 leave partial ones.
    with LLM(
        str(model_dir),
        dtype="float32",
        max_num_batched_tokens=24,
        num_kv_blocks=96,
        **layout,
    ) as llm:
        together, _ = greedy(llm, prompts)
        assert together == want
        again, cached = greedy(llm, prompts)
        assert again == want
        assert max(cached) >= 32, "the second run must hit the prefix cache"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_moe_layouts_match_transformers(
    model: str,
    layout: str,
    tiny_model_dir: Callable[..., Path],
    expected: Callable[[Path], list[list[int]]],
) -> None:
    family, overrides = MODELS[model]
    model_dir = tiny_model_dir(family, **overrides)
    check(model_dir, LAYOUTS[layout], expected(model_dir))


@pytest.mark.parametrize("replicas", [1, 2])
def test_dense_replicas_match_transformers(
    replicas: int,
    tiny_model_dir: Callable[..., Path],
    expected: Callable[[Path], list[list[int]]],
) -> None:
    model_dir = tiny_model_dir("llama", attention_bias=True, head_dim=24)
    check(model_dir, {"data_parallel_size": replicas}, expected(model_dir))


def test_gloo_transport_matches_transformers(
    tiny_model_dir: Callable[..., Path],
    expected: Callable[[Path], list[list[int]]],
) -> None:
    family, overrides = MODELS["mixtral-3-experts"]
    model_dir = tiny_model_dir(family, **overrides)
    check(model_dir, LAYOUTS["1A+2E"] | {"transport": "gloo"}, expected(model_dir))


def test_four_ranks_on_two_cores_match_transformers(
    tiny_model_dir: Callable[..., Path],
    expected: Callable[[Path], list[list[int]]],
) -> None:
    family, overrides = MODELS["granite"]
    model_dir = tiny_model_dir(family, **overrides)
    layout = {"attention_ranks": 2, "expert_ranks": 2, "disaggregate": True}
    check(model_dir, layout, expected(model_dir))
