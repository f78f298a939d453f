"""Rounds between ranks of one host: memfd segments per ordered pair, eventfd doorbells.

The sender writes rows into a slot and posting stores a sequence word; the receiver computes where
they lie and writes the reply beside them. Nobody is called and nothing blocks.
A receiver that sleeps has raised its flag, and whoever posts to it rings its eventfd. Files and
bells have no names: they travel over the peer links with SCM_RIGHTS, and the kernel frees them
with the last process.
"""

import os
import socket
import threading
from collections.abc import Mapping, Sequence

import torch

from coterie.errors import RankDied
from coterie.experts.rows import RowBuffer, Rows
from coterie.router.round import Round, RoundHeader, RoundKind
from coterie.router.state import SeatState, StepKind
from coterie.router.transports import segment as seg
from coterie.router.transports.base import GONE, RoundShape
from coterie.router.transports.hello import closed_links, make_hello, recv_hello, send_hello
from coterie.router.transports.readiness import readable

TRANSPORT = 1


class _Outbox:
    """Our end of a pair we send on."""

    def __init__(self, segment: seg.Segment) -> None:
        self.segment = segment
        self.posted = 0
        self.released = 0
        self.num_tokens = [0] * segment.num_slots


class _Inbox:
    """Our end of a pair we receive on."""

    def __init__(self, segment: seg.Segment) -> None:
        self.segment = segment
        self.done = 0
        """Sequence of the last round answered or dropped."""
        self.round: Round | None = None


class SharedMemoryTransport:
    """See ``Transport``. Made by ``create``."""

    def __init__(self, seat: int, epoch: int, shape: RoundShape) -> None:
        self.seat = seat
        self.epoch = epoch
        self.peers: tuple[int, ...] = ()
        self.max_rows = shape.max_rows
        self.num_stale = 0
        self._shape = shape
        self._fds: list[int] = []
        self._links: dict[int, socket.socket] = {}
        self._bell = -1
        self._bells: dict[int, int] = {}
        self._board: memoryview = memoryview(b"")
        self._boards: dict[int, memoryview] = {}
        self._states: dict[int, tuple[int, SeatState]] = {}
        self._out: dict[int, _Outbox] = {}
        self._in: dict[int, _Inbox] = {}
        self._watched: list[tuple[memoryview, int]] = []
        self._last_words: list[int] = []
        self._sleep_fds: list[int] = []
        self._dead: set[int] = set()
        self._lock = threading.Lock()
        self._lock.acquire()
        self._closed = False

    @classmethod
    def create(
        cls,
        *,
        seat: int,
        epoch: int,
        links: Mapping[int, socket.socket],
        attention_seats: Sequence[int],
        expert_seats: Sequence[int],
        shape: RoundShape,
        deadline_s: float,
    ) -> "SharedMemoryTransport":
        """Connect to all peers; every peer must call this too.

        Args:
            links: connected, authenticated, blocking unix sockets to every peer; they belong to
                the transport from now on, and their end is evidence of the peer's death.
            shape: must be equal on all seats.

        Raises:
            HandshakeError: a peer disagrees about epoch, roles or shape, or is too slow.
            RankDied: a peer closed its link.
        Blocks: at most ``deadline_s`` per peer.
        """
        self = cls(seat, epoch, shape)
        self._links = dict(links)
        self.peers = tuple(sorted(links))
        try:
            self._connect(attention_seats, expert_seats, deadline_s)
        except BaseException:
            self.close()
            raise
        return self

    def _connect(
        self, attention_seats: Sequence[int], expert_seats: Sequence[int], deadline_s: float
    ) -> None:
        mine = make_hello(
            seat=self.seat,
            transport=TRANSPORT,
            epoch=self.epoch,
            shape=self._shape,
            attention_seats=attention_seats,
            expert_seats=expert_seats,
        )
        board = self._own(seg.create_file("coterie-board", seg.BOARD_BYTES))
        self._board = seg.map_words(board, seg.BOARD_BYTES)[1]
        self._bell = self._own(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.publish(SeatState(epoch=self.epoch, step=0, layer=0, kind=StepKind.IDLE))
        size = seg.SegmentLayout.of(self._shape).total_bytes
        for peer, link in sorted(self._links.items()):
            link.settimeout(deadline_s)
            fds = [board, self._bell]
            if self.seat in attention_seats and peer in expert_seats:
                fds.append(seg.create_file("coterie-rounds", size))
                self._out[peer] = _Outbox(seg.Segment(fds[2], self._shape))
            send_hello(link, mine, fds)
            for fd in fds[2:]:
                os.close(fd)  # mapped here, and on its way to the peer
        for peer, link in sorted(self._links.items()):
            fds = recv_hello(link, mine, peer, max_fds=3)
            self._adopt(peer, fds, peer in attention_seats and self.seat in expert_seats)
        self._watched = [(box.segment.words, seg.REQUEST) for box in self._in.values()]
        self._watched += [(box.segment.words, seg.REPLY) for box in self._out.values()]
        self._sleep_fds = [self._bell, *(link.fileno() for link in self._links.values())]

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _adopt(self, peer: int, fds: list[int], receives: bool) -> None:
        try:
            if len(fds) != 2 + receives:
                raise RankDied(f"seat {self.seat}: seat {peer} sent {len(fds)} descriptors")
            self._boards[peer] = seg.map_words(fds[0], seg.BOARD_BYTES, writable=False)[1]
            self._bells[peer] = self._own(os.dup(fds[1]))
            if receives:
                self._in[peer] = _Inbox(seg.Segment(fds[2], self._shape))
        finally:
            for fd in fds:
                os.close(fd)

    def reserve(self, peer: int, num_tokens: int) -> RowBuffer:
        box = self._out[peer]
        assert num_tokens <= self.max_rows, "the caller cuts rounds to max_rows"
        assert box.posted - box.released < box.segment.num_slots, "release a reply before posting"
        return box.segment.slot(box.posted + 1)

    def post(self, peer: int, layer: int, num_tokens: int, *, big: bool) -> int:
        if peer in self._dead:
            raise self._died(peer)
        box = self._out[peer]
        sequence = box.posted + 1
        words, num_slots = box.segment.words, box.segment.num_slots
        word = seg.header_word(sequence, num_slots)
        words[word + seg.EPOCH] = self.epoch
        words[word + seg.SOURCE] = self.seat
        words[word + seg.LAYER] = layer
        words[word + seg.SEQUENCE] = sequence
        words[word + seg.NUM_TOKENS] = num_tokens
        words[word + seg.BIG] = big
        words[word + seg.KIND] = RoundKind.EXPERTS
        box.num_tokens[sequence % num_slots] = num_tokens
        box.posted = sequence
        self._announce(peer, words, seg.REQUEST, sequence)
        return sequence

    def _announce(self, peer: int, words: memoryview, index: int, sequence: int) -> None:
        """Store a sequence word after everything it announces, then ring a sleeper."""
        self._fence()
        words[index] = sequence
        self._fence()
        if self._boards[peer][seg.SLEEPING]:
            os.eventfd_write(self._bells[peer], 1)

    def _fence(self) -> None:
        # Two atomic read-modify-writes: a full barrier, at a tenth of the cost of a system call.
        self._lock.release()
        self._lock.acquire()

    def poll(self, peer: int) -> Round | None:
        box = self._in.get(peer)
        if box is None:
            return None
        if box.round is None and box.segment.words[seg.REQUEST] > box.done:
            box.round = self._read(box)
        return box.round

    def _read(self, box: _Inbox) -> Round | None:
        self._fence()
        segment = box.segment
        while segment.words[seg.REQUEST] > box.done:
            sequence = box.done + 1
            word = seg.header_word(sequence, segment.num_slots)
            header = segment.words[word : word + seg.KIND + 1].tolist()
            if header[seg.EPOCH] > self.epoch:
                return None  # held until this seat adopts that epoch
            if header[seg.EPOCH] < self.epoch:
                box.done = sequence
                self.num_stale += 1
                continue
            num_tokens = header[seg.NUM_TOKENS]
            return Round(
                RoundHeader(
                    epoch=header[seg.EPOCH],
                    source=header[seg.SOURCE],
                    layer=header[seg.LAYER],
                    sequence=sequence,
                    num_tokens=num_tokens,
                    big=bool(header[seg.BIG]),
                    kind=RoundKind(header[seg.KIND]),
                ),
                Rows(segment.slot(sequence), num_tokens),
            )
        return None

    def reply(self, round: Round) -> None:
        peer = round.header.source
        box = self._in[peer]
        assert round is box.round, "rounds of one peer are answered in order"
        box.done = round.header.sequence
        box.round = None
        self._announce(peer, box.segment.words, seg.REPLY, box.done)

    def poll_reply(self, peer: int, sequence: int) -> torch.Tensor | None:
        box = self._out[peer]
        if box.segment.words[seg.REPLY] < sequence:
            if peer in self._dead:
                raise self._died(peer)
            return None
        self._fence()
        num_tokens = box.num_tokens[sequence % box.segment.num_slots]
        return box.segment.reply(sequence, num_tokens)

    def release(self, peer: int, sequence: int) -> None:
        box = self._out[peer]
        assert sequence == box.released + 1, "replies are released in order"
        box.released = sequence

    def publish(self, state: SeatState) -> None:
        self._board[seg.STATE] = state.pack()

    def peer_state(self, peer: int) -> SeatState:
        if peer in self._dead:
            return GONE
        word = self._boards[peer][seg.STATE]
        known = self._states.get(peer)
        if known is None or known[0] != word:
            known = self._states[peer] = (word, SeatState.unpack(word))
        return known[1]

    def block(self, timeout_s: float, wake_fds: Sequence[int] = ()) -> bool:
        """See ``Transport``; also returns when a round or reply came since the last call.

        Raises:
            RankDied: a link closed since the last call; once per peer.
        """
        sleeping = timeout_s > 0.0 and self._nothing_new()
        if sleeping:
            self._board[seg.SLEEPING] = 1
            self._fence()
            # Whoever posts after this look sees the flag and rings.
            sleeping = self._nothing_new()
        try:
            ready = readable([*self._sleep_fds, *wake_fds], timeout_s if sleeping else 0.0)
        finally:
            self._board[seg.SLEEPING] = 0
        if not ready:
            return False
        if self._bell in ready:
            os.eventfd_read(self._bell)
        for peer in closed_links(self._links, ready):
            self._bury(peer)
            raise self._died(peer)
        return any(fd in ready for fd in wake_fds)

    def _nothing_new(self) -> bool:
        words = [view[index] for view, index in self._watched]
        same = words == self._last_words
        self._last_words = words
        return same

    def _bury(self, peer: int) -> None:
        self._dead.add(peer)
        link = self._links.pop(peer)
        self._sleep_fds.remove(link.fileno())
        link.close()

    def _died(self, peer: int) -> RankDied:
        return RankDied(
            f"seat {self.seat}: seat {peer} closed its link (epoch {self.epoch}); it is gone"
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for segment in [b.segment for b in self._out.values()] + [
            b.segment for b in self._in.values()
        ]:
            segment.close()
        for view in (self._board, *self._boards.values()):
            view.release()
        for fd in self._fds:
            os.close(fd)
        for link in self._links.values():
            link.close()
        self._watched.clear()
        self._links.clear()
