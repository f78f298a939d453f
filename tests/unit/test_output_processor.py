"""Committed tokens to what a caller sees, and the stream that hands it out."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import Cancelled
from coterie.runtime.detokenizer import Detokenizer
from coterie.runtime.engine.choice import Choice
from coterie.runtime.engine.output_processor import process
from coterie.runtime.engine.request_stream import RequestStream
from coterie.runtime.messages import TokenOutput
from coterie.runtime.request import RequestOutput, SamplingParams, TokenLogprob
from coterie.runtime.tokenizer import Tokenizer

EOS = 257


@pytest.fixture(scope="module")
def tokenizer(
    write_byte_tokenizer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


async def _ignore(request_id: str) -> None:
    return None


def _choice(tokenizer: Tokenizer | None, **params: Any) -> Choice:
    settings = SamplingParams(max_tokens=50, **params)
    return Choice(
        choice_id="r-0",
        index=0,
        prompt_token_ids=[1, 2],
        params=settings,
        eos_token_ids=[EOS],
        detokenizer=Detokenizer(tokenizer, [1, 2], settings),
        stream=RequestStream("r", 1, _ignore),
    )


def _news(text: str, finish: str | None = None, **more: Any) -> TokenOutput:
    return TokenOutput("r-0", list(text.encode()), finish, **more)


def test_eos_is_in_the_ids_but_not_in_the_text(tokenizer: Tokenizer) -> None:
    choice = _choice(tokenizer)
    first = process(choice, _news("Hi", num_cached_tokens=1)).output
    last = process(choice, TokenOutput("r-0", [EOS], "stop")).output
    assert (first.text, first.prompt_token_ids, first.num_cached_tokens) == ("Hi", [1, 2], 1)
    assert (last.text, last.token_ids, last.finish_reason) == ("", [EOS], "stop")
    assert last.stop_reason is None
    assert last.prompt_token_ids is None
    assert choice.output_token_ids == [72, 105, EOS]


def test_stop_token_is_named_and_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    hidden = process(
        _choice(tokenizer, stop_token_ids=(65,)), _news("xA", "stop", stop_token_id=65)
    )
    shown = process(
        _choice(tokenizer, stop_token_ids=(65,), include_stop_str_in_output=True),
        _news("xA", "stop", stop_token_id=65),
    )
    assert (hidden.output.text, hidden.output.stop_reason) == ("x", 65)
    assert shown.output.text == "xA"


def test_stop_string_across_steps_ends_early_and_drops_the_rest(tokenizer: Tokenizer) -> None:
    choice = _choice(tokenizer, stop=("END",))
    texts = [process(choice, _news(piece)).output.text for piece in ("ab", "E", "N")]
    ended = process(choice, _news("Dxyz"))
    assert "".join(texts) + ended.output.text == "ab"
    assert ended.stopped_early
    assert ended.output.finish_reason == "stop"
    assert ended.output.stop_reason == "END"
    assert ended.output.token_ids == [ord("D")]
    assert bytes(choice.output_token_ids) == b"abEND"


def test_stop_string_with_the_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    ended = process(_choice(tokenizer, stop=("b",)), _news("ab", "length"))
    assert not ended.stopped_early
    assert (ended.output.text, ended.output.finish_reason) == ("a", "stop")


def test_without_tokenizer_only_ids_come() -> None:
    output = process(_choice(None), _news("ab", "length")).output
    assert (output.text, output.token_ids, output.finish_reason) == ("", [97, 98], "length")


def _delta(index: int, text: str, finish: Any = None, **more: Any) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        index=index,
        text=text,
        token_ids=list(text.encode()),
        finish_reason=finish,
        **more,
    )


async def test_a_slow_reader_gets_merged_deltas() -> None:
    stream = RequestStream("r", 2, _ignore)
    logprob = TokenLogprob(97, -0.5)
    stream.put(_delta(0, "a", prompt_token_ids=[1], logprobs=[logprob]))
    stream.put(_delta(1, "x"))
    stream.put(_delta(0, "b", "length", logprobs=[logprob]))
    stream.put(_delta(1, "y", "stop"))
    got = [output async for output in stream]
    assert [(o.index, o.text, o.finish_reason) for o in got] == [
        (0, "ab", "length"),
        (1, "xy", "stop"),
    ]
    assert got[0].prompt_token_ids == [1]
    assert got[0].logprobs == [logprob, logprob]


async def test_a_failed_stream_hands_out_what_waits_then_raises() -> None:
    stream = RequestStream("r", 1, _ignore)
    stream.put(_delta(0, "a"))
    stream.fail(Cancelled("gone"))
    assert (await anext(stream)).text == "a"
    with pytest.raises(Cancelled):
        await anext(stream)


async def test_close_aborts_once_and_only_what_runs() -> None:
    aborted: list[str] = []
    stream: RequestStream

    async def abort(request_id: str) -> None:
        aborted.append(request_id)
        stream.fail(Cancelled("closed"))

    stream = RequestStream("r", 1, abort)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(Cancelled):
        await reader
    assert aborted == ["r"]
    done = RequestStream("s", 1, abort)
    done.put(_delta(0, "a", "stop"))
    await done.aclose()
    assert aborted == ["r"]
