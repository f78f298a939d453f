"""Admission: what is refused before anything runs, and what is cut."""

from typing import Any

import pytest

from coterie.errors import InvalidRequest
from coterie.runtime.engine.admission import TOO_LONG, Admission
from coterie.runtime.request import GenerateRequest, SamplingParams


def admission(**changes: Any) -> Admission:
    options: dict[str, Any] = {
        "tokenizer": None,
        "vocab_size": 100,
        "eos_token_ids": (0,),
        "max_model_len": 20,
        "max_cache_tokens": 32,
        "attention_seats": (0,),
        "seed": 0,
    }
    return Admission(**(options | changes))


def request(num_prompt: int, max_tokens: int | None, **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens)
    ids = [1] * num_prompt
    return GenerateRequest(request_id="r", prompt_token_ids=ids, sampling_params=params, **fields)


async def test_too_many_tokens_are_cut_unless_refused() -> None:
    assert len(await admission().prompt_token_ids(request(10, 11))) == 10
    await admission().prompt_token_ids(request(10, 10, refuse_cut=True))
    await admission().prompt_token_ids(request(19, None, refuse_cut=True))
    with pytest.raises(InvalidRequest, match="maximum context length is 20 tokens") as caught:
        await admission().prompt_token_ids(request(10, 11, refuse_cut=True))
    assert "21 tokens (10 in the prompt, 11 in the completion)" in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("max_tokens", TOO_LONG)


@pytest.mark.parametrize(
    ("changes", "num_prompt", "refuse_cut", "param"),
    [
        ({}, 20, False, "prompt"),
        ({}, 20, True, "prompt"),
        ({"max_cache_tokens": 16}, 16, False, "prompt"),
        ({"max_cache_tokens": 16}, 15, True, "max_tokens"),
    ],
)
async def test_every_refusal_of_length_has_its_code(
    changes: dict[str, Any], num_prompt: int, refuse_cut: bool, param: str
) -> None:
    wanted = request(num_prompt, 2, refuse_cut=refuse_cut)
    with pytest.raises(InvalidRequest) as caught:
        await admission(**changes).prompt_token_ids(wanted)
    assert (caught.value.param, caught.value.code) == (param, TOO_LONG)


@pytest.mark.parametrize("token", [-1, 100])
async def test_ids_outside_the_vocabulary(token: int) -> None:
    wrong = GenerateRequest(request_id="r", prompt_token_ids=[1, token])
    says = f"must be between 0 and 99, got {token}"
    with pytest.raises(InvalidRequest, match=says) as caught:
        await admission().prompt_token_ids(wrong)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match=f"stop_token_ids {says}"):
        SamplingParams(stop_token_ids=(token,)).validate(100)
    with pytest.raises(InvalidRequest, match=f"logit_bias {says}"):
        SamplingParams(logit_bias={token: 1.0}).validate(100)
