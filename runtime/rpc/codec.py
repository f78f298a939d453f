"""Frames: 4-byte little-endian length, then one msgpack message. Nothing is ever unpickled."""

import struct
from typing import Any, TypeVar

import msgspec

from coterie.errors import ProtocolError

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """A complete frame.

    Raises:
        ProtocolError: the message is larger than ``MAX_FRAME_BYTES``.
    """
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length announced by a frame's first 4 bytes.

    Raises:
        ProtocolError: more than ``MAX_FRAME_BYTES`` is announced.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {length} bytes announced; the limit is {MAX_FRAME_BYTES}")
    return int(length)


def decoder(kind: type[_T] | Any) -> msgspec.msgpack.Decoder[_T]:
    """A schema-checking decoder for one message type or a union of them."""
    return msgspec.msgpack.Decoder(kind)


def decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes | memoryview) -> _T:
    """Decode one body.

    Raises:
        ProtocolError: the bytes do not follow the schema.
    """
    try:
        return decoder.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
