"""Detokenizer: incomplete characters, prompts that end in one, special tokens, stop strings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import InvalidRequest
from coterie.runtime.detokenizer import Detokenizer, TextDelta, Utf8Stream, incomplete_tail
from coterie.runtime.request import SamplingParams
from coterie.runtime.tokenizer import Tokenizer

EOS = 257
SMILE = list("\U0001f600".encode())  # f0 9f 98 80


@pytest.fixture(scope="module")
def tokenizer(
    tmp_path_factory: pytest.TempPathFactory, write_byte_tokenizer: Callable[..., Path]
) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("detokenizer")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of Llama 2's and Mixtral's kind: visible spaces and byte fallback."""
    from tokenizers import AddedToken, decoders, normalizers
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import BPE

    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581Hi",
        "a",
    ]
    model = BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    fast = Fast(model)
    fast.normalizer = normalizers.Replace(" ", "\u2581")
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    folder = tmp_path_factory.mktemp("sentencepiece")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def run(
    tokenizer: Tokenizer | None, pieces: list[list[int]], prompt: list[int] | None = None, **kw: Any
) -> list[TextDelta]:
    state = Detokenizer(tokenizer, prompt or [], SamplingParams(**kw))
    last = len(pieces) - 1
    return [state.push(piece, index == last) for index, piece in enumerate(pieces)]


def texts(deltas: list[TextDelta]) -> list[str]:
    return [delta.text for delta in deltas]


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"", 0),
        (b"abc", 0),
        (b"a\xc3", 1),
        (b"a\xc3\xa9", 0),
        (b"\xf0\x9f\x98", 3),
        (b"\xf0\x9f", 2),
        (b"\xff", 0),
        (b"\x80\x80\x80", 0),
        (b"\xe0\x80", 0),  # an overlong form is never completed
        (b"\xed\xa0", 0),  # nor is a surrogate
    ],
)
def test_incomplete_tail(data: bytes, length: int) -> None:
    assert incomplete_tail(data) == length


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    pieces = [[ord("a")], *([byte] for byte in SMILE), [ord("b")]]
    assert texts(run(tokenizer, pieces)) == ["a", "", "", "", "\U0001f600", "b"]


def test_a_broken_character_shows_only_at_the_end(tokenizer: Tokenizer) -> None:
    assert texts(run(tokenizer, [SMILE[:2], [], []])) == ["", "", "\ufffd"]
    assert texts(run(tokenizer, [SMILE[:2], [ord("a")], []])) == ["", "\ufffda", ""]


def test_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    prompt = [*b"secret", *SMILE[:2]]
    assert texts(run(tokenizer, [SMILE[2:3], SMILE[3:], [ord("x")]], prompt)) == [
        "",
        "\U0001f600",
        "x",
    ]
    assert texts(run(tokenizer, [[ord("x")], []], prompt)) == ["x", ""]
    pieces = [[0x98], [0x98], [ord("A")]]
    assert texts(run(tokenizer, pieces, [*b"s", 0xF0])) == ["", "", "\ufffd\ufffdA"]
    assert texts(run(tokenizer, [[]], prompt)) == [""]


def test_utf8_stream_borrows_once() -> None:
    stream = Utf8Stream(b"\xc3")
    assert stream.push(b"\xa9\xc3") == "\u00e9"
    assert stream.finish() == "\ufffd"


def test_special_tokens(tokenizer: Tokenizer) -> None:
    pieces = [[*b"a", EOS, *b"b", EOS]]
    assert texts(run(tokenizer, pieces)) == ["ab"]
    assert texts(run(tokenizer, pieces, skip_special_tokens=False)) == ["a</s>b</s>"]
    assert texts(run(tokenizer, [[ord("a"), 99_999]])) == ["a"], "ids of no token add nothing"


def test_sentencepiece_spaces(sentencepiece: Tokenizer) -> None:
    hi, a = 259, 260
    assert texts(run(sentencepiece, [[hi], [hi], [a]])) == ["Hi", " Hi", "a"]
    assert texts(run(sentencepiece, [[hi], [a]], [1])) == ["Hi", "a"], "a text starts after <s>"
    assert texts(run(sentencepiece, [[hi], [a]], [1, a])) == [" Hi", "a"], "a text goes on"
    smile = [2 + byte for byte in SMILE]
    assert texts(run(sentencepiece, [smile[:3], smile[3:]])) == ["", "\U0001f600"]
    assert sentencepiece.token_bytes(hi) == b" Hi"
    assert run(sentencepiece, [[hi, hi, a]])[0].text == sentencepiece.decode([hi, hi, a])


def test_stop_string_across_pushes(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, [[*b"one E"], [*b"N"], [*b"D two"]], stop=("END",))
    assert texts(deltas) == ["one ", "", ""]
    assert deltas[2].stop_string == "END"
    assert deltas[2].num_tokens == 1, "the token that completes it is read, no more"


def test_only_what_may_become_a_stop_string_is_held(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, [[*b"aab"], [*b"aax"], [*b"aa"]], stop=("aabaab",))
    assert texts(deltas) == ["", "aabaax", "aa"]


def test_the_stop_string_that_completes_first_wins(tokenizer: Tokenizer) -> None:
    (delta,) = run(tokenizer, [[*b"xabcd"]], stop=("abcd", "bc", "abc"))
    assert (delta.text, delta.stop_string) == ("x", "abc")
    (delta,) = run(tokenizer, [[*b"xabcd"]], stop=("abc", "b"), include_stop_str_in_output=True)
    assert (delta.text, delta.stop_string) == ("xab", "b")


def test_stop_string_of_a_flushed_character(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, [[*b"a"], SMILE[:1]], stop=("\ufffd",))
    assert deltas[1].stop_string == "\ufffd"
    assert texts(deltas) == ["a", ""]


def test_min_tokens_shields_the_beginning(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, [[*b"xEND"], [*b"END"]], stop=("END",), min_tokens=4)
    assert texts(deltas) == ["xEND", ""]
    assert deltas[1].stop_string == "END"


def test_nothing_after_a_stop(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, [[*b"a."], [*b"b"], [*b"c"]], stop=(".",))
    assert texts(deltas) == ["a", "", ""]
    assert [delta.stop_string for delta in deltas] == [".", None, None]


def test_without_a_tokenizer() -> None:
    assert texts(run(None, [[1, 2], [3]])) == ["", ""]
    with pytest.raises(InvalidRequest, match="tokenizer"):
        run(None, [[1]], stop=("a",))
