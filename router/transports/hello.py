"""First exchange on a peer link: do both ends agree on epoch, roles and round shape?

Fixed-size binary frames over connected, authenticated unix stream sockets; shared memory passes
its descriptors with the same frame. Both ends compare and both fail naming seats and field.
"""

import array
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from coterie.errors import HandshakeError, RankDied
from coterie.router.transports.base import RoundShape

VERSION = 1
"""Of the hello frame, the segment layout and the announcements together."""
MAGIC = 0x434F5452
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
FIELDS = (
    "version",
    "transport",
    "epoch",
    "hidden_size",
    "top_k",
    "dtype",
    "max_rows",
    "num_slots",
    "attention_seats",
    "expert_seats",
)
_FRAME = struct.Struct("<II" + "Q" * len(FIELDS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What one end says of itself; ``facts`` must be equal on both ends."""

    seat: int
    facts: tuple[int, ...]
    """In the order of ``FIELDS``."""

    def pack(self) -> bytes:
        return _FRAME.pack(MAGIC, self.seat, *self.facts)

    @staticmethod
    def unpack(frame: bytes) -> "Hello":
        magic, seat, *facts = _FRAME.unpack(frame)
        if magic != MAGIC:
            raise HandshakeError("peer link does not start with a router hello")
        return Hello(seat=seat, facts=tuple(facts))


def make_hello(
    *,
    seat: int,
    transport: int,
    epoch: int,
    shape: RoundShape,
    attention_seats: Sequence[int],
    expert_seats: Sequence[int],
) -> Hello:
    """Args: ``transport`` is a number per kind of transport."""
    return Hello(
        seat=seat,
        facts=(
            VERSION,
            transport,
            epoch,
            shape.hidden_size,
            shape.top_k,
            DTYPES[shape.dtype],
            shape.max_rows,
            shape.num_slots,
            sum(1 << s for s in attention_seats if s < 64),
            sum(1 << s for s in expert_seats if s < 64),
        ),
    )


def send_hello(link: socket.socket, hello: Hello, fds: Sequence[int] = ()) -> None:
    """Raises: RankDied if the link is closed."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        link.sendmsg([hello.pack()], ancillary)
    except (ConnectionError, TimeoutError) as error:
        raise RankDied(f"seat {hello.seat}: peer link closed while connecting") from error


def recv_hello(link: socket.socket, mine: Hello, peer: int, max_fds: int = 0) -> list[int]:
    """Check the peer's hello and return the descriptors that came with it.

    Raises:
        HandshakeError: it does not fit, or did not come within the socket's timeout.
        RankDied: the link is closed.
    """
    frame = b""
    fds: list[int] = []
    try:
        while len(frame) < _FRAME.size:
            data, new_fds, _, _ = socket.recv_fds(link, _FRAME.size - len(frame), max_fds)
            fds += new_fds
            if not data:
                raise RankDied(f"seat {mine.seat}: seat {peer} closed the link while connecting")
            frame += data
        _compare(mine, Hello.unpack(frame), peer)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise HandshakeError(f"seat {mine.seat}: no hello from seat {peer} in time") from error
        if isinstance(error, ConnectionError):
            raise RankDied(f"seat {mine.seat}: seat {peer} closed the link") from error
        raise
    return fds


def _compare(mine: Hello, theirs: Hello, peer: int) -> None:
    if theirs.seat != peer:
        raise HandshakeError(
            f"seat {mine.seat}: link to seat {peer} is answered by seat {theirs.seat}"
        )
    for field, ours, other in zip(FIELDS, mine.facts, theirs.facts, strict=True):
        if ours != other:
            raise HandshakeError(
                f"seat {mine.seat} and seat {peer} differ in {field}: {ours} against {other}"
            )


def closed_links(links: Mapping[int, socket.socket], ready: Sequence[int]) -> list[int]:
    """Seats whose links, readable according to ``ready``, are at their end.

    Nothing is ever sent on a link after the hello, so stray data counts as a broken link too.
    """
    closed = []
    for seat, link in links.items():
        if link.fileno() not in ready:
            continue
        try:
            link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        except ConnectionError:
            pass
        closed.append(seat)
    return closed
