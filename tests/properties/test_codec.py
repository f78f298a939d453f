"""Every wire message survives its frame; broken frames are refused and nothing else happens."""

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ProtocolError
from coterie.runtime import messages
from coterie.runtime.messages import Message
from coterie.runtime.request import SamplingParams, TokenLogprob
from coterie.runtime.rpc import codec, handshake, protocol

WIRE = sorted(
    {
        kind
        for module in (messages, handshake, protocol)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    },
    key=lambda kind: kind.__struct_config__.tag,
)
EVERY: Any = typing.Union[tuple(WIRE)]  # noqa: UP007 - built at run time
RAW = st.integers(0, 99).map(lambda value: msgspec.Raw(msgspec.msgpack.encode(value)))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-5, 5), max_size=3),
)
FLOATS = st.floats(allow_nan=False)
st.register_type_strategy(msgspec.Raw, RAW)
st.register_type_strategy(SamplingParams, PARAMS)
st.register_type_strategy(float, FLOATS)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(TokenLogprob, st.builds(TokenLogprob, st.integers(0, 9), FLOATS))


def instances(kind: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {name: st.from_type(hints[name]) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


for _nested in (messages.SeatAddress, messages.TokenOutput):
    st.register_type_strategy(_nested, instances(_nested))


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in WIRE]
    assert len(tags) == len(set(tags)) >= 20


@pytest.mark.parametrize("kind", WIRE, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type) -> None:
    decoder = codec.decoder(EVERY)

    @settings(max_examples=15, deadline=None)
    @given(instances(kind))
    def check(message: Any) -> None:
        frame = codec.encode(message)
        assert codec.body_length(frame[:4]) == len(frame) - 4
        back = codec.decode(decoder, frame[4:])
        assert type(back) is kind
        for name in kind.__struct_fields__:
            ours, theirs = getattr(message, name), getattr(back, name)
            if isinstance(ours, msgspec.Raw):
                ours, theirs = bytes(ours), bytes(theirs)
            assert ours == theirs

    check()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_noise_is_refused_or_valid(body: bytes) -> None:
    try:
        message = codec.decode(codec.decoder(EVERY), body)
    except ProtocolError:
        return
    assert isinstance(message, tuple(WIRE))


def test_sizes_are_limited() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        codec.body_length(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="limit"):
        codec.encode(b"x" * (codec.MAX_FRAME_BYTES + 1))
