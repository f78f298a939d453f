"""The connection to the engine as the main loop uses it: frames in, frames out, never blocking."""

import contextlib
import select
import socket
from collections import deque

import msgspec

from coterie.errors import ProtocolError
from coterie.runtime.messages import (
    Abort,
    Acknowledge,
    Assign,
    Join,
    Load,
    Message,
    QueryStatus,
    Serve,
    Stop,
)
from coterie.runtime.rpc import codec

EngineMessage = Join | Load | Serve | Assign | Abort | Acknowledge | QueryStatus | Stop
MAX_BACKLOG_BYTES = 64 << 20
"""An engine that leaves this much unread counts as gone."""
_RECV_BYTES = 1 << 18
_DECODER: msgspec.msgpack.Decoder[EngineMessage] = codec.decoder(EngineMessage)


class EngineLink:
    """One engine's connection. ``closed`` turns True when it ends, for whatever reason."""

    def __init__(self, sock: socket.socket, generation: int) -> None:
        self.generation = generation
        self.closed = False
        self._sock = sock
        self._sock.setblocking(False)
        self._received = bytearray()
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def receive(self) -> list[EngineMessage]:
        """Every complete message that has arrived."""
        messages: list[EngineMessage] = []
        if self.closed:
            return messages
        try:
            while True:
                piece = self._sock.recv(_RECV_BYTES)
                if not piece:
                    self.close()
                    break
                self._received += piece
                if len(piece) < _RECV_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        try:
            self._parse(messages)
        except ProtocolError:
            # Nothing after a malformed frame can be trusted; a sound engine attaches again.
            self.close()
        return messages

    def _parse(self, messages: list[EngineMessage]) -> None:
        size = codec.HEADER.size
        start = 0
        with memoryview(self._received) as view:
            while len(view) - start >= size:
                length = codec.body_length(bytes(view[start : start + size]))
                end = start + size + length
                if end > len(view):
                    break
                messages.append(codec.decode(_DECODER, bytes(view[start + size : end])))
                start = end
        del self._received[:start]

    def send(self, message: Message) -> None:
        """Queue a message and send what the socket takes now."""
        if self.closed:
            return
        frame = codec.encode(message)
        self._backlog.append(memoryview(frame))
        self._backlog_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send as much of the backlog as the socket takes."""
        if self.closed:
            return
        try:
            while self._backlog:
                count = self._sock.send(self._backlog[0])
                self._backlog_bytes -= count
                if count < len(self._backlog[0]):
                    self._backlog[0] = self._backlog[0][count:]
                else:
                    self._backlog.popleft()
        except BlockingIOError:
            if self._backlog_bytes > MAX_BACKLOG_BYTES:
                self.close()
        except OSError:
            self.close()

    def drain(self, deadline_s: float) -> None:
        """Send the whole backlog before the process ends.

        Blocks: up to ``deadline_s``.
        """
        self.flush()
        if self._backlog and not self.closed:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll(deadline_s * 1000)
            self.flush()

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        self._backlog.clear()
        with contextlib.suppress(OSError):
            self._sock.close()
