"""Frames of the public msgpack RPC: calls, replies, chunks, ends; and gRPC's status names.

Shared by server and client; knows no method. One connection carries many calls; each frame names
its call. Per call a window of chunks may be unread: a slow reader stops its own stream and no
other. Tags are wire numbers and are never reused.
"""

from enum import StrEnum

import msgspec

from coterie import errors
from coterie.runtime.messages import Message

PROTOCOL_VERSION = 1
CHUNK_WINDOW = 64
"""Chunks of one call that may be sent before the reader grants more."""


class Status(StrEnum):
    """gRPC's canonical status names, as far as they are used."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class RpcOpen(Message, tag=96):
    """First frame of a connection; may be left out when the server asks for no key."""

    protocol: int = PROTOCOL_VERSION
    api_key: str | None = None


class RpcCall(Message, tag=97):
    call_id: int
    """Chosen by the caller, positive, unique among its open calls."""
    method: str
    deadline_ms: int
    """From arrival; 0 = none."""
    payload: msgspec.Raw


class RpcReply(Message, tag=98):
    """The answer of a unary call; ends it with OK."""

    call_id: int
    payload: msgspec.Raw


class RpcChunk(Message, tag=99):
    """One item of a streaming call."""

    call_id: int
    payload: msgspec.Raw


class RpcEnd(Message, tag=100):
    """End of a call; call_id 0 ends the connection."""

    call_id: int
    status: Status
    detail: str = ""
    retry_after_s: float | None = None
    """With RESOURCE_EXHAUSTED: when trying again makes sense."""
    param: str | None = None
    """With INVALID_ARGUMENT: the offending field."""


class RpcCancel(Message, tag=101):
    call_id: int


class RpcCredit(Message, tag=102):
    """The reader took this many chunks; as many more may be sent."""

    call_id: int
    count: int


TO_SERVER = RpcOpen | RpcCall | RpcCancel | RpcCredit
TO_CLIENT = RpcReply | RpcChunk | RpcEnd


def end_of(call_id: int, error: BaseException) -> RpcEnd:
    """The end frame for an exception; says nothing of exceptions that are not ours."""
    if isinstance(error, TimeoutError):
        error = errors.DeadlineExceeded(str(error) or "the deadline passed")
    if not isinstance(error, errors.CoterieError) or error.status == Status.INTERNAL:
        return RpcEnd(call_id=call_id, status=Status.INTERNAL, detail="internal error")
    return RpcEnd(
        call_id=call_id,
        status=Status(error.status),
        detail=str(error),
        retry_after_s=getattr(error, "retry_after_s", None),
        param=getattr(error, "param", None),
    )


def error_of(end: RpcEnd) -> errors.CoterieError:
    """The exception a caller sees for an end that is not OK; its ``status`` is the end's."""
    error = _error_of(end)
    error.status = end.status.value
    return error


def _error_of(end: RpcEnd) -> errors.CoterieError:
    match end.status:
        case Status.INVALID_ARGUMENT:
            return errors.InvalidRequest(end.detail, end.param)
        case Status.NOT_FOUND | Status.UNIMPLEMENTED:
            return errors.NotFound(end.detail)
        case Status.RESOURCE_EXHAUSTED:
            return errors.QueueFull(end.detail, end.retry_after_s or 1.0)
        case Status.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(end.detail)
        case Status.CANCELLED:
            return errors.Cancelled(end.detail)
        case Status.UNAUTHENTICATED:
            return errors.HandshakeError(end.detail)
        case Status.UNAVAILABLE:
            return errors.EngineDead(end.detail)
        case _:
            return errors.RuntimeFailure(f"{end.status}: {end.detail}")
