"""The engine's end of one socket to one rank: handshake, frames in, frames out.

Two of these per rank: purpose "engine" carries assignments and step outputs, purpose "heartbeat"
carries nothing but heartbeats, which a busy main loop of the rank cannot hold up.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from coterie.errors import HandshakeError, PlacementError, ProtocolError, RuntimeFailure
from coterie.runtime.messages import (
    Failed,
    Heartbeat,
    Joined,
    Loaded,
    Message,
    Progress,
    RankStatus,
    SeatAddress,
    StepOutput,
)
from coterie.runtime.rpc import codec, handshake

RankMessage = Joined | Progress | Loaded | Failed | StepOutput | Heartbeat | RankStatus
_Receive = Callable[[memoryview], None]


class _Frames(asyncio.Protocol):
    """Cuts a byte stream into frames; no copy of a frame that arrives whole."""

    def __init__(self) -> None:
        self.receive: _Receive = lambda body: None
        self.lost: Callable[[str], None] = lambda reason: None
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer)
            self._buffer.clear()
        view, start, header = memoryview(data), 0, codec.HEADER.size
        try:
            while len(view) - start >= header:
                end = start + header + codec.body_length(bytes(view[start : start + header]))
                if end > len(view):
                    break
                self.receive(view[start + header : end])
                start = end
        except (ProtocolError, HandshakeError) as error:
            self._fail(str(error))
            return
        self._buffer += view[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "connection closed")

    def _fail(self, reason: str) -> None:
        lost, self.lost = self.lost, lambda reason: None
        if self.transport is not None:
            self.transport.abort()
        lost(reason)


class RankConnection:
    """An authenticated connection. Made by ``open``; used on the event loop only."""

    def __init__(self, seat: int, frames: _Frames) -> None:
        self.seat = seat
        self._frames = frames
        self._early: list[bytes] = []
        self._decoder: msgspec.msgpack.Decoder[RankMessage] = codec.decoder(RankMessage)

    @staticmethod
    async def open(
        address: SeatAddress,
        *,
        token: bytes,
        purpose: str,
        generation: int,
        versions: dict[str, str],
        on_message: Callable[[Any], None],
        on_lost: Callable[[int, str], None],
        deadline_s: float,
    ) -> "RankConnection":
        """Connect and prove the token both ways.

        Args:
            purpose: "engine" or "heartbeat".
            generation: of this engine; a rank obeys only the newest.
            on_message: gets every decoded message of the rank.
            on_lost: gets (seat, reason) once, when the connection ends without ``close``.

        Raises:
            HandshakeError: wrong token or version, or the rank closed the connection.
            ProtocolError: what it sent follows no schema.
            PlacementError: nothing listens at the address, or it does not answer in time.
        """
        frames = _Frames()
        connection = RankConnection(address.seat, frames)
        try:
            async with asyncio.timeout(deadline_s):
                # Before connecting: the rank speaks first, and at once.
                replies = connection._collect()
                await _connect(address, frames)
                await connection._prove(replies, token, purpose, generation, versions)
            connection._take_over(on_message, on_lost)
        except TimeoutError:
            connection.close()
            raise PlacementError(
                f"rank {address.seat} at {address.address} does not answer"
            ) from None
        except OSError as error:
            raise PlacementError(
                f"cannot reach rank {address.seat} at {address.address}: {error}"
            ) from error
        except RuntimeFailure:
            connection.close()
            raise
        return connection

    def _take_over(
        self, on_message: Callable[[Any], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """From the handshake to messages, those that came early first."""
        frames, decoder = self._frames, self._decoder
        if frames.transport is None or frames.transport.is_closing():
            raise HandshakeError(f"rank {self.seat} closed the connection after the handshake")
        for body in self._early:
            on_message(codec.decode(decoder, body))
        self._early.clear()
        frames.receive = lambda body: on_message(codec.decode(decoder, body))
        frames.lost = lambda reason: on_lost(self.seat, reason)

    def _collect(self) -> "asyncio.Queue[Any]":
        """Handshake messages as they come, or the error that ended the connection."""
        replies: asyncio.Queue[Any] = asyncio.Queue()
        decoder: msgspec.msgpack.Decoder[Any] = codec.decoder(handshake.HANDSHAKE)

        def receive(body: memoryview) -> None:
            message = codec.decode(decoder, body)
            replies.put_nowait(message)
            if isinstance(message, handshake.Welcome):
                # What follows is no handshake, and may follow before anybody reads the Welcome.
                self._frames.receive = lambda later: self._early.append(bytes(later))

        self._frames.receive = receive
        self._frames.lost = lambda reason: replies.put_nowait(HandshakeError(reason))
        return replies

    async def _prove(
        self,
        replies: "asyncio.Queue[Any]",
        token: bytes,
        purpose: str,
        generation: int,
        versions: dict[str, str],
    ) -> None:
        async def reply() -> Any:
            answer = await replies.get()
            if isinstance(answer, HandshakeError):
                raise HandshakeError(f"rank {self.seat} during the handshake: {answer}")
            return answer

        hello = await reply()
        if not isinstance(hello, handshake.Hello) or hello.seat != self.seat:
            raise HandshakeError(f"expected rank {self.seat}, got {hello!r}")
        handshake.compare_versions(hello.seat, hello.versions, -1, versions)
        sent = handshake.attach(
            hello, token=token, purpose=purpose, seat=-1, epoch=generation, versions=versions
        )
        self.send(sent)
        handshake.check_welcome(hello, sent, await reply(), token)

    def send(self, message: Message) -> None:
        """Queue a message; never blocks. A connection that is gone drops it."""
        transport = self._frames.transport
        if transport is not None and not transport.is_closing():
            transport.write(codec.encode(message))

    def close(self) -> None:
        """Close without notice to ``on_lost``."""
        self._frames.lost = lambda reason: None
        if self._frames.transport is not None:
            self._frames.transport.close()


async def _connect(address: SeatAddress, frames: _Frames) -> None:
    loop = asyncio.get_running_loop()
    kind, _, where = address.address.partition(":")
    if kind == "unix":
        await loop.create_unix_connection(lambda: frames, where)
    elif kind == "tcp":
        host, _, port = where.rpartition(":")
        await loop.create_connection(lambda: frames, host, int(port))
    else:
        raise PlacementError(f"rank {address.seat} listens at {address.address}: unknown kind")
