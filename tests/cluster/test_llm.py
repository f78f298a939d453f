"""``coterie.LLM``: blocking calls over an engine in a thread, ranks as plain processes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coterie import LLM, SamplingParams
from coterie.errors import EngineDead, InvalidRequest


def test_llm_gives_results_in_prompt_order(tiny_model_dir: Callable[..., Path]) -> None:
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(tiny_model_dir("mixtral"), data_parallel_size=1, num_kv_blocks=64) as llm:
        results = llm.generate(["ab", [1, 2, 3], "ab"], greedy)
        assert [result.prompt_token_ids for result in results] == [[97, 98], [1, 2, 3], [97, 98]]
        assert [result.prompt for result in results] == ["ab", None, "ab"]
        assert results[0].outputs[0].token_ids == results[2].outputs[0].token_ids
        assert results[0].outputs[0].finish_reason == "length"
        logprobs = results[0].outputs[0].logprobs
        assert logprobs is not None
        assert [entry.token_id for entry in logprobs] == results[0].outputs[0].token_ids
        same = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=greedy)
        assert same[0].outputs[0].token_ids == results[1].outputs[0].token_ids
        chat = llm.chat([{"role": "user", "content": "hi"}], greedy)
        assert chat[0].prompt_token_ids[0] == 258
        with pytest.raises(InvalidRequest):
            llm.generate(["ok", []], greedy)
        _refuse_what_is_no_prompt(llm)
        assert llm.generate("ab", greedy)[0].outputs[0].token_ids == (
            results[0].outputs[0].token_ids
        )
    with pytest.raises(EngineDead):
        llm.generate("ab")


def _refuse_what_is_no_prompt(llm: LLM) -> None:
    accepted = r"prompts is a text, a list of token ids, or a list of such; prompt_token_ids is"
    for prompts, words in (
        (3, r"prompts cannot be 3 \(int\)"),
        (["a", 3], r"prompts\[1\] cannot be 3 \(int\)"),
        ([1, "a"], r"prompts\[0\] cannot be 1 \(int\)"),
        ([True], r"prompts\[0\] cannot be True \(bool\)"),
        ([[1, 2.5]], r"prompts\[0\] cannot be \[1, 2.5\] \(list\)"),
        ([None], r"prompts\[0\] cannot be None"),
        (b"abc", r"prompts cannot be b'abc' \(bytes\)"),
        ({"prompt": "a"}, r"prompts cannot be {'prompt': 'a'} \(dict\)"),
        (None, "give either prompts or prompt_token_ids"),
    ):
        with pytest.raises(InvalidRequest, match=f"{words}.*: {accepted}"):
            llm.generate(prompts)  # type: ignore[arg-type]
    for ids in ("abc", ["abc"], [[1], "abc"]):
        with pytest.raises(InvalidRequest, match="prompt_token_ids.* cannot be .*abc"):
            llm.generate(prompt_token_ids=ids)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="give either prompts or prompt_token_ids"):
        llm.generate("a", prompt_token_ids=[1])
    for params in (3, [SamplingParams(), 3]):
        with pytest.raises(InvalidRequest, match="sampling_params is a SamplingParams or a list"):
            llm.generate(["a", "b"], params)  # type: ignore[arg-type]
    for messages in (3, "hi", None, ["hi"], [[]], [[{"role": "user", "content": "a"}], "b"]):
        with pytest.raises(InvalidRequest, match="messages is a conversation"):
            llm.chat(messages)  # type: ignore[arg-type]
    assert llm.generate([]) == []


def test_llm_refuses_unknown_options() -> None:
    with pytest.raises(TypeError, match="unknown option 'blocksize'"):
        LLM("nothing", blocksize=3)
