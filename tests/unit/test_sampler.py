"""Sampler: row independence, seeds, distributions, filters and penalties against hand numbers."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from coterie.errors import InvalidRequest
from coterie.runtime.messages import Assign
from coterie.runtime.rank.requests import Request, SampledToken
from coterie.runtime.rank.sampler import draw, sample, uniform
from coterie.runtime.request import SamplingParams


def make_request(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    *,
    choice: int = 0,
    eos: list[int] | None = None,
    **params: object,
) -> Request:
    assign = Assign(
        request_id="r",
        prompt_token_ids=prompt or [0],
        output_token_ids=[],
        sampling_params=SamplingParams(**{"seed": 1, **params}),  # type: ignore[arg-type]
        choice=choice,
        eos_token_ids=eos or [],
    )
    return Request(assign, 0, [*(prompt or [0]), *(output or [])])


def token(logits: list[float] | torch.Tensor, request: Request) -> int:
    row = logits if isinstance(logits, torch.Tensor) else torch.tensor(logits)
    (result,) = sample(row[None], [request])
    assert isinstance(result, SampledToken)
    return result.token_id


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [7, 4999]] = 2.0
    logits[1, [4000, 41]] = 2.0
    requests = [make_request(temperature=0.0) for _ in range(3)]
    results = sample(logits, requests)
    assert [r.token_id for r in results if isinstance(r, SampledToken)] == [7, 41, 0]
    assert token(logits[0], make_request(temperature=0.0, logprobs=1)) == 7


def test_uniform_is_a_pure_function() -> None:
    assert uniform(1, 0, 5) == uniform(1, 0, 5)
    numbers = {uniform(s, c, p) for s in (-1, 0, 1) for c in (0, 1) for p in (0, 1)}
    assert len(numbers) == 12
    many = [uniform(3, 0, p) for p in range(2000)]
    assert min(many) >= 0.0
    assert max(many) < 1.0
    assert np.mean(many) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}],
    ids=str,
)
def test_a_row_does_not_depend_on_the_others(params: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3001, generator=generator) * 3
    requests = [
        make_request(output=[1] * row, seed=row, temperature=1.0 + row / 10, **params)
        for row in range(6)
    ]
    together = sample(logits, requests)
    for row in range(6):
        assert sample(logits[row : row + 1].clone(), requests[row : row + 1]) == [together[row]]
    backwards = sample(logits.flip(0), requests[::-1])
    assert backwards[::-1] == together


def test_seed_choice_and_position_change_the_draw() -> None:
    logits = torch.zeros(4096)
    base = token(logits, make_request(seed=1))
    assert token(logits, make_request(seed=1)) == base
    assert token(logits, make_request(seed=2)) != base
    assert token(logits, make_request(seed=1, choice=1)) != base
    assert token(logits, make_request(seed=1, output=[3])) != base


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
    ],
    ids=str,
)
def test_distribution(params: dict[str, float], expected: list[float]) -> None:
    """Every number on a fine grid: frequencies are the filtered probabilities, exactly."""
    order = [2, 0, 3, 1]
    logits = np.empty(4, dtype=np.float32)
    logits[order] = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    counts = Counter(draw(logits, settings, (i + 0.5) / 1000) for i in range(1000))
    for rank, token_id in enumerate(order):
        assert counts[token_id] / 1000 == pytest.approx(expected[rank], abs=0.002)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_over_a_large_vocabulary(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(1000, generator=generator) * 2).numpy()
    scaled = logits / np.float32(temperature)
    wanted = np.exp(scaled - scaled.max()).astype(np.float64)
    wanted /= wanted.sum()
    grid = [draw(scaled, SamplingParams(), (i + 0.5) / 20000) for i in range(20000)]
    counts = np.bincount(grid, minlength=1000) / 20000
    assert np.abs(counts - wanted).max() < 1.1 / 20000


def test_nucleus_falls_back_to_the_whole_vocabulary() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    seen = {draw(logits, SamplingParams(top_p=0.9), (i + 0.5) / 5000) for i in range(5000)}
    assert len(seen) == pytest.approx(4500, abs=2)


def test_zero_mass_tokens_are_never_drawn() -> None:
    logits = np.full(600, -np.inf, dtype=np.float32)
    logits[[3, 300]] = 0.0
    assert draw(logits, SamplingParams(), 0.0) == 3
    assert draw(logits, SamplingParams(), 1.0 - 2.0**-53) == 300
    assert draw(logits, SamplingParams(top_p=0.99), 1.0 - 2.0**-53) == 300


def test_repetition_penalty_covers_prompt_and_output() -> None:
    """2.0 / 1.5 = 1.33 (prompt), -1.0 * 1.5 = -1.5 (output), 1.4 untouched."""
    request = make_request([0], [1], temperature=0.0, repetition_penalty=1.5)
    assert token([2.0, -1.0, 1.4], request) == 2
    assert token([2.2, -1.0, 1.4], request) == 0
    assert token([-3.0, -1.0, -1.4], request) == 2


def test_frequency_and_presence_cover_output_only() -> None:
    """Token 1 came twice: 3.0 - 2 * 0.5 - 0.4 = 1.6. Token 0 is of the prompt: untouched."""
    request = make_request(
        [0], [1, 1], temperature=0.0, frequency_penalty=0.5, presence_penalty=0.4
    )
    assert token([1.5, 3.0, 0.0], request) == 1
    assert token([1.7, 3.0, 0.0], request) == 0


def test_logit_bias_and_min_tokens() -> None:
    assert token([1.0, 0.0], make_request(temperature=0.0, logit_bias={1: 1.5})) == 1
    request = make_request(temperature=0.0, min_tokens=2, eos=[2], stop_token_ids=(1,))
    assert token([0.0, 5.0, 9.0], request) == 0
    request.token_ids += [0, 0]
    assert token([0.0, 5.0, 9.0], request) == 2


def test_no_token_left_is_an_error_of_that_row_only() -> None:
    bad = make_request(temperature=0.0, min_tokens=1, eos=[0, 1])
    good = make_request(temperature=0.0)
    first, second = sample(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), [bad, good])
    assert isinstance(first, InvalidRequest)
    assert second == SampledToken(1)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    request = make_request(temperature=0.0, logprobs=3, logit_bias={0: 100.0})
    (result,) = sample(logits, [request])
    assert isinstance(result, SampledToken)
    assert result.logprobs is not None
    expected = torch.log_softmax(logits[0], dim=0).tolist()
    assert result.token_id == result.logprobs.token_id == 0
    assert result.logprobs.logprob == pytest.approx(expected[0])
    assert [i for i, _ in result.logprobs.top] == [1, 3, 2]
    assert [p for _, p in result.logprobs.top] == pytest.approx([expected[i] for i in (1, 3, 2)])
    (result,) = sample(logits, [make_request(temperature=0.0, logprobs=0)])
    assert isinstance(result, SampledToken)
    assert result.logprobs is not None
    assert result.logprobs.top == []
    assert math.isclose(result.logprobs.logprob, expected[1], rel_tol=1e-6)


def test_logits_are_not_modified() -> None:
    logits = torch.randn(1, 50)
    before = logits.clone()
    sample(logits, [make_request(logit_bias={1: 5.0}, presence_penalty=1.0, output=[2])])
    assert torch.equal(logits, before)
