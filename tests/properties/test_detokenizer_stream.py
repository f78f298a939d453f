"""However tokens are cut into pushes, the deltas add up to the same text, and to the right one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.runtime.detokenizer import Detokenizer, TextDelta
from coterie.runtime.request import SamplingParams
from coterie.runtime.tokenizer import Tokenizer

TEXT = st.text(st.sampled_from("ab \u00e9\u20ac\U0001f600\u0301\n"), max_size=24)
NOISE = st.binary(max_size=6)
STOPS = st.lists(
    st.text(st.sampled_from("ab \u00e9\U0001f600"), min_size=1, max_size=5), max_size=3
)


@pytest.fixture(scope="module")
def tokenizer(
    tmp_path_factory: pytest.TempPathFactory, write_byte_tokenizer: Callable[..., Path]
) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("stream")))


def feed(
    tokenizer: Tokenizer,
    tokens: list[int],
    cuts: list[int],
    params: SamplingParams,
    prompt: list[int],
) -> list[TextDelta]:
    state = Detokenizer(tokenizer, prompt, params)
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    spans = list(zip(edges, edges[1:], strict=False)) or [(0, 0)]
    return [state.push(tokens[a:b], b == len(tokens)) for a, b in spans]


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The obvious way: look at every prefix of the text in turn."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            best = max(matches, key=len)
            return text[: end if include else end - len(best)], best
    return text, None


@settings(max_examples=150, deadline=None)
@given(TEXT, NOISE, TEXT, STOPS, st.booleans(), st.lists(st.integers(0, 99), max_size=8), NOISE)
def test_deltas_add_up(
    tokenizer: Tokenizer,
    head: str,
    noise: bytes,
    tail: str,
    stops: list[str],
    include: bool,
    cuts: list[int],
    prompt_noise: bytes,
) -> None:
    data = head.encode() + noise + tail.encode()
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    prompt = [*b"prompt ", *prompt_noise, ord("a")]  # ends with a whole character
    deltas = feed(tokenizer, list(data), cuts, params, prompt)
    text, stop = expected(data.decode("utf-8", "replace"), stops, include)
    assert "".join(delta.text for delta in deltas) == text
    assert [d.stop_string for d in deltas if d.stop_string] == ([stop] if stop else [])
    if not stops:
        assert text == tokenizer.decode(list(data))


@settings(max_examples=150, deadline=None)
@given(TEXT, st.integers(0, 60), st.lists(st.integers(0, 99), max_size=8))
def test_a_text_cut_anywhere_between_prompt_and_output_is_whole(
    tokenizer: Tokenizer, text: str, cut: int, cuts: list[int]
) -> None:
    data = text.encode()
    cut %= len(data) + 1
    deltas = feed(tokenizer, list(data[cut:]), cuts, SamplingParams(), list(data[:cut]))
    before = data[:cut].decode("utf-8", "ignore")
    assert before + "".join(delta.text for delta in deltas) == text or cut == len(data)


@settings(max_examples=100, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 99), max_size=8), st.integers(0, 12))
def test_cutting_changes_nothing_with_min_tokens(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int], min_tokens: int
) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens)
    tokens = list(text.encode())
    whole = feed(tokenizer, tokens, [], params, [])
    parts = feed(tokenizer, tokens, cuts, params, [])
    singles = feed(tokenizer, tokens, list(range(len(tokens))), params, [])
    joined = {"".join(delta.text for delta in deltas) for deltas in (whole, parts, singles)}
    assert len(joined) == 1


@settings(max_examples=100, deadline=None)
@given(TEXT, STOPS)
def test_no_replacement_character_before_the_end(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    state = Detokenizer(tokenizer, [], SamplingParams(stop=tuple(stops)))
    for token in text.encode():
        assert "\ufffd" not in state.push([token], False).text
