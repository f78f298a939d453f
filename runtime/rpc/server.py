"""Server of the public msgpack RPC: connections, calls, deadlines, cancel, back-pressure.

Generic: it is given a table of methods and knows nothing of what they do. Started by ``serve``
beside the HTTP server, on the same event loop. A malformed frame ends its connection with a
reason and nothing else; a dropped connection cancels its calls.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from coterie.errors import CoterieError, HandshakeError, ProtocolError
from coterie.runtime.rpc import codec
from coterie.runtime.rpc.protocol import (
    CHUNK_WINDOW,
    PROTOCOL_VERSION,
    TO_SERVER,
    RpcCall,
    RpcCancel,
    RpcChunk,
    RpcCredit,
    RpcEnd,
    RpcOpen,
    RpcReply,
    Status,
    end_of,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of the method table. Exactly one of the two handlers is set."""

    payload: Any
    """Type of the call's payload; anything else is INVALID_ARGUMENT."""
    unary: Callable[[Any], Awaitable[Any]] | None = None
    stream: Callable[[Any], AsyncGenerator[Any, None]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcLimits:
    """What one client may use up."""

    max_frame_bytes: int = 16 << 20
    max_connections: int = 1024
    max_calls: int = 1024
    """Open calls of one connection."""
    open_s: float = 10.0
    """Until the key has arrived, when one is asked for."""
    stall_s: float = 300.0
    """A reader that takes nothing for this long loses its call or connection."""


class _Call:
    """One call in flight: its task and how many chunks it may still send."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.credit = CHUNK_WINDOW
        self.granted = asyncio.Event()


class RpcServer:
    """Serves a table of methods on one socket.

    Args:
        methods: full method name to handler.
        api_key: asked for in the first frame; None = open.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        api_key: str | None = None,
        limits: RpcLimits | None = None,
    ) -> None:
        self._methods = methods
        self._api_key = api_key
        self._limits = limits if limits is not None else RpcLimits()
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket."""
        self._server = await asyncio.start_server(self._serve, sock=sock)

    async def close(self, drain_s: float) -> None:
        """Accept nothing more, let open calls end within ``drain_s``, then cancel them."""
        if self._server is None:
            return
        self._server.close()
        tasks = [task for conn in self._connections for task in conn.tasks()]
        if tasks and drain_s > 0:
            await asyncio.wait(tasks, timeout=drain_s)
        for connection in list(self._connections):
            await connection.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer, self._methods, self._api_key, self._limits)
        if len(self._connections) >= self._limits.max_connections:
            await connection.refuse(Status.RESOURCE_EXHAUSTED, "too many connections", 1.0)
            await connection.close()
            return
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            await connection.close()


class _Connection:
    """One client: reads frames, runs its calls, writes their frames."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        methods: Mapping[str, Method],
        api_key: str | None,
        limits: RpcLimits,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._methods, self._api_key, self._limits = methods, api_key, limits
        self._calls: dict[int, _Call] = {}
        self._decoder: msgspec.msgpack.Decoder[Any] = codec.decoder(TO_SERVER)

    def tasks(self) -> list[asyncio.Task[None]]:
        return [call.task for call in self._calls.values() if call.task is not None]

    async def run(self) -> None:
        """Read until the client leaves or breaks the protocol."""
        try:
            if self._api_key is not None:
                await self._authenticate(self._api_key)
            while True:
                await self._handle(await self._read())
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except CoterieError as error:
            end = end_of(0, error)
            await self.refuse(end.status, end.detail)

    async def close(self) -> None:
        """Cancel all calls, wait for them, close the socket."""
        tasks = self.tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._limits.open_s)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    async def refuse(self, status: Status, detail: str, retry_after_s: float | None = None) -> None:
        """End the connection with a reason."""
        frame = RpcEnd(call_id=0, status=status, detail=detail, retry_after_s=retry_after_s)
        with contextlib.suppress(OSError, TimeoutError):
            await self._send(frame)

    async def _read(self) -> Any:
        header = await self._reader.readexactly(codec.HEADER.size)
        length = codec.body_length(header)
        if length > self._limits.max_frame_bytes:
            raise ProtocolError(
                f"frame of {length} bytes announced; the limit is {self._limits.max_frame_bytes}"
            )
        return codec.decode(self._decoder, await self._reader.readexactly(length))

    async def _authenticate(self, api_key: str) -> None:
        try:
            async with asyncio.timeout(self._limits.open_s):
                first = await self._read()
        except TimeoutError as error:
            raise HandshakeError("no API key arrived in time") from error
        offered = first.api_key if isinstance(first, RpcOpen) else None
        if not hmac.compare_digest((offered or "").encode(), api_key.encode()):
            raise HandshakeError("a valid API key is required")

    async def _handle(self, frame: Any) -> None:
        match frame:
            case RpcCall():
                await self._begin(frame)
            case RpcCancel(call_id=call_id):
                call = self._calls.get(call_id)
                if call is not None and call.task is not None:
                    call.task.cancel()
            case RpcCredit(call_id=call_id, count=count):
                call = self._calls.get(call_id)
                if call is not None and count > 0:
                    call.credit = min(call.credit + count, CHUNK_WINDOW)
                    call.granted.set()
            case RpcOpen(protocol=protocol):
                if protocol != PROTOCOL_VERSION:
                    raise ProtocolError(f"protocol {protocol}; this server speaks 1")

    async def _begin(self, frame: RpcCall) -> None:
        if frame.call_id < 1 or frame.call_id in self._calls:
            raise ProtocolError(f"call_id {frame.call_id} is not positive or still open")
        method = self._methods.get(frame.method)
        if method is None:
            detail = f"no method {frame.method!r}; there are {', '.join(sorted(self._methods))}"
            await self._send(RpcEnd(frame.call_id, Status.UNIMPLEMENTED, detail))
        elif len(self._calls) >= self._limits.max_calls:
            detail = f"{self._limits.max_calls} calls are open on this connection"
            await self._send(RpcEnd(frame.call_id, Status.RESOURCE_EXHAUSTED, detail, 1.0))
        else:
            call = self._calls[frame.call_id] = _Call()
            call.task = asyncio.create_task(self._run(frame, method, call))

    async def _run(self, frame: RpcCall, method: Method, call: _Call) -> None:
        """One call from payload to end; no exception leaves it."""
        end: Any
        try:
            async with asyncio.timeout(frame.deadline_ms / 1e3 or None):
                end = await self._answer(frame, method, call)
        except asyncio.CancelledError:
            end = RpcEnd(frame.call_id, Status.CANCELLED, "cancelled")
        except Exception as error:
            end = end_of(frame.call_id, error)
            if end.status is Status.INTERNAL:
                _LOG.exception("%s failed", frame.method)
        # Before the last frame: its reader may use the id again at once.
        self._calls.pop(frame.call_id, None)
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            await self._send(end)

    async def _answer(self, frame: RpcCall, method: Method, call: _Call) -> RpcReply | RpcEnd:
        payload = codec.decode(codec.decoder(method.payload), memoryview(frame.payload))
        if method.unary is not None:
            reply = await method.unary(payload)
            return RpcReply(call_id=frame.call_id, payload=_raw(reply))
        assert method.stream is not None
        async with contextlib.aclosing(method.stream(payload)) as items:
            async for item in items:
                await self._window(call)
                await self._send(RpcChunk(call_id=frame.call_id, payload=_raw(item)))
        return RpcEnd(call_id=frame.call_id, status=Status.OK)

    async def _window(self, call: _Call) -> None:
        while call.credit == 0:
            call.granted.clear()
            async with asyncio.timeout(self._limits.stall_s):
                await call.granted.wait()
        call.credit -= 1

    async def _send(self, frame: Any) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the client left")
        self._writer.write(codec.encode(frame))
        try:
            # Not wait_for: before Python 3.12 it can swallow a cancellation.
            async with asyncio.timeout(self._limits.stall_s):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))
