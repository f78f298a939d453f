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
        assert llm.generate("ab", greedy)[0].outputs[0].token_ids == (
            results[0].outputs[0].token_ids
        )
    with pytest.raises(EngineDead):
        llm.generate("ab")


def test_llm_refuses_unknown_options() -> None:
    with pytest.raises(TypeError, match="unknown option 'blocksize'"):
        LLM("nothing", blocksize=3)
