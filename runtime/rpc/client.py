"""Client end of the public msgpack RPC: one connection, many calls, deadlines, cancel.

Generic and asyncio-only; ``api.client`` gives it methods and types. Imports neither torch nor
transformers nor ray. A lost connection fails its open calls; the owner connects again.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from typing import Any, Self, TypeVar

import msgspec

from coterie.errors import CoterieError, DeadlineExceeded, EngineDead
from coterie.runtime.rpc import codec
from coterie.runtime.rpc.protocol import (
    CHUNK_WINDOW,
    TO_CLIENT,
    RpcCall,
    RpcCancel,
    RpcChunk,
    RpcCredit,
    RpcEnd,
    RpcOpen,
    RpcReply,
    Status,
    error_of,
)

_T = TypeVar("_T")
_GRACE_S = 1.0  # the server's own deadline answer should win over ours


class RpcConnection:
    """One open connection. Not thread-safe: belongs to the loop that made it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._calls: dict[int, asyncio.Queue[RpcReply | RpcChunk | RpcEnd]] = {}
        self._ids = itertools.count(1)
        self._lost: RpcEnd | None = None
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def connect(
        cls, host: str, port: int, *, api_key: str | None = None, timeout_s: float = 10.0
    ) -> Self:
        """Connect and send the key.

        Raises:
            EngineDead: nobody answers there.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise EngineDead(f"no Coterie RPC server at {host}:{port}: {error}") from error
        writer.write(codec.encode(RpcOpen(api_key=api_key)))
        return cls(reader, writer)

    @property
    def closed(self) -> bool:
        return self._lost is not None

    async def close(self) -> None:
        """Close; open calls fail, the server cancels them."""
        self._task.cancel()
        self._fail(RpcEnd(0, Status.CANCELLED, "the client was closed"))
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    async def unary(
        self, method: str, payload: Any, reply: type[_T] | Any, timeout_s: float | None
    ) -> _T:
        """One call, one answer.

        Raises:
            CoterieError: the status of the call as an exception.
        """
        async with contextlib.aclosing(self._frames(method, payload, timeout_s)) as frames:
            async for frame in frames:
                return codec.decode(codec.decoder(reply), memoryview(frame.payload))
        raise EngineDead(f"{method} ended without an answer")

    async def stream(
        self, method: str, payload: Any, item: type[_T] | Any, timeout_s: float | None
    ) -> AsyncGenerator[_T, None]:
        """One call, many answers. Leaving the iteration early cancels the call.

        Raises:
            CoterieError: the status of the call as an exception.
        """
        decoder = codec.decoder(item)
        async with contextlib.aclosing(self._frames(method, payload, timeout_s)) as frames:
            async for frame in frames:
                yield codec.decode(decoder, memoryview(frame.payload))

    async def _frames(
        self, method: str, payload: Any, timeout_s: float | None
    ) -> AsyncGenerator[RpcReply | RpcChunk, None]:
        call_id = next(self._ids)
        queue: asyncio.Queue[RpcReply | RpcChunk | RpcEnd] = asyncio.Queue()
        deadline_ms = 0 if timeout_s is None else max(1, round(timeout_s * 1e3))
        loop = asyncio.get_running_loop()
        ends_at = None if timeout_s is None else loop.time() + timeout_s + _GRACE_S
        self._calls[call_id] = queue
        ended, taken = False, 0
        try:
            raw = msgspec.Raw(msgspec.msgpack.encode(payload))
            await self._send(RpcCall(call_id, method, deadline_ms, raw))
            while True:
                frame = await self._next(queue, ends_at, method)
                ended = not isinstance(frame, RpcChunk)
                if isinstance(frame, RpcEnd):
                    if frame.status is not Status.OK:
                        raise error_of(frame)
                    return
                yield frame
                if ended:
                    return
                taken += 1
                if taken == CHUNK_WINDOW // 2:
                    await self._send(RpcCredit(call_id, taken))
                    taken = 0
        finally:
            del self._calls[call_id]
            if not ended and not self.closed:
                with contextlib.suppress(CoterieError, OSError):
                    self._writer.write(codec.encode(RpcCancel(call_id)))

    async def _next(
        self,
        queue: asyncio.Queue[RpcReply | RpcChunk | RpcEnd],
        ends_at: float | None,
        method: str,
    ) -> RpcReply | RpcChunk | RpcEnd:
        try:
            async with asyncio.timeout_at(ends_at):
                return await queue.get()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method}: no answer before the deadline") from error

    async def _send(self, frame: Any) -> None:
        if self._lost is not None:
            raise error_of(self._lost)
        try:
            self._writer.write(codec.encode(frame))
            await self._writer.drain()
        except ConnectionError:
            # The reader knows better why: the server may have said so before it closed.
            await asyncio.wait({self._task}, timeout=1.0)
            raise error_of(self._lost or _lost("the server closed the connection")) from None

    async def _receive(self) -> None:
        decoder: msgspec.msgpack.Decoder[Any] = codec.decoder(TO_CLIENT)
        end = _lost("the server closed the connection")
        try:
            while True:
                header = await self._reader.readexactly(codec.HEADER.size)
                body = await self._reader.readexactly(codec.body_length(header))
                frame = codec.decode(decoder, body)
                if isinstance(frame, RpcEnd) and frame.call_id == 0:
                    end = frame
                    return
                queue = self._calls.get(frame.call_id)
                if queue is not None:  # frames of a call that was left are dropped
                    queue.put_nowait(frame)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except CoterieError as error:
            end = _lost(f"the server sent a malformed frame: {error}")
        finally:
            self._fail(end)
            self._writer.close()

    def _fail(self, end: RpcEnd) -> None:
        if self._lost is None:
            self._lost = end
        for queue in self._calls.values():
            queue.put_nowait(self._lost)


def _lost(detail: str) -> RpcEnd:
    return RpcEnd(call_id=0, status=Status.UNAVAILABLE, detail=detail)
