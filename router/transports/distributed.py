"""Rounds over torch.distributed (gloo): announced on the peer links, tensors by send and receive.

Per peer one progress thread reads announcements, receives the announced tensor and queues it; the
rank's own thread only looks at queues. Dispatch and combine use groups of their own, made directly
and not registered globally, so that an epoch's groups are simply replaced.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from coterie.errors import HandshakeError, RankDied
from coterie.experts.rows import RowBuffer, Rows
from coterie.router.round import Round, RoundHeader, RoundKind
from coterie.router.state import SeatState
from coterie.router.transports.announcements import Announcement, FrameType, recv_frame
from coterie.router.transports.base import GONE, RoundShape
from coterie.router.transports.hello import make_hello, recv_hello, send_hello
from coterie.router.transports.readiness import readable, wait_writable

TRANSPORT = 2
TAG = 0
_c10d: Any = dist  # its type stubs miss most of the classes used here


class _Peer:
    """Link and queues of one peer. The progress thread appends, the rank's thread takes."""

    def __init__(self, seat: int, rank: int, link: socket.socket) -> None:
        self.seat = seat
        self.rank = rank
        """Rank in the process groups."""
        self.link = link
        self.rounds: deque[tuple[Announcement, torch.Tensor]] = deque()
        self.current: Round | None = None
        self.replies: dict[int, torch.Tensor] = {}
        self.state = GONE
        self.failure: str | None = None
        self.reported = False
        self.posted = 0
        self.released = 0
        self.draft: RowBuffer | None = None
        """Where the next round is written; copied when it is posted."""
        # Tensors must live until they are sent; a slot is reused only after its reply came.
        self.sending: dict[int, tuple[Any, torch.Tensor]] = {}
        self.replying: dict[int, tuple[Any, torch.Tensor]] = {}
        self.thread: threading.Thread | None = None


class DistributedTransport:
    """See ``Transport``. Made by ``create``."""

    def __init__(self, seat: int, epoch: int, shape: RoundShape, deadline_s: float) -> None:
        self.seat = seat
        self.epoch = epoch
        self.peers: tuple[int, ...] = ()
        self.max_rows = shape.max_rows
        self.num_stale = 0
        self._shape = shape
        self._deadline_s = deadline_s
        self._peers: dict[int, _Peer] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._dispatch: Any = None
        self._combine: Any = None
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
        store_dir: str,
        host: str = "127.0.0.1",
    ) -> "DistributedTransport":
        """Connect to all peers; every peer must call this too.

        Args:
            links: connected, authenticated, blocking stream sockets to every peer; they belong to
                the transport from now on, and their end is evidence of the peer's death.
            shape: must be equal on all seats.
            deadline_s: for connecting, and for one announced tensor to arrive.
            store_dir: private folder, shared by all seats, for the rendezvous of this epoch.
            host: own address that the peers can reach.

        Raises:
            HandshakeError: a peer disagrees about epoch, roles or shape, or is too slow.
            RankDied: a peer closed its link.
        Blocks: at most a few times ``deadline_s``.
        """
        self = cls(seat, epoch, shape, deadline_s)
        self.peers = tuple(sorted(links))
        members = sorted((seat, *links))
        self._peers = {p: _Peer(p, members.index(p), links[p]) for p in self.peers}
        mine = make_hello(
            seat=seat,
            transport=TRANSPORT,
            epoch=epoch,
            shape=shape,
            attention_seats=attention_seats,
            expert_seats=expert_seats,
        )
        try:
            for link in links.values():
                link.settimeout(deadline_s)
                send_hello(link, mine)
            for other in self.peers:
                recv_hello(links[other], mine, other)
            self._make_groups(members.index(seat), len(members), store_dir, host)
        except BaseException:
            self.close()
            raise
        for peer in self._peers.values():
            peer.link.settimeout(None)
            peer.thread = threading.Thread(
                target=self._progress, args=(peer,), name=f"rounds-from-{peer.seat}", daemon=True
            )
            peer.thread.start()
        return self

    def _make_groups(self, rank: int, size: int, store_dir: str, host: str) -> None:
        try:
            store = _c10d.FileStore(os.path.join(store_dir, f"rounds-{self.epoch}"), size)
            store.set_timeout(timedelta(seconds=self._deadline_s))
            self._dispatch, self._combine = (
                _c10d.ProcessGroupGloo(
                    _c10d.PrefixStore(name, store), rank, size, self._options(host)
                )
                for name in ("dispatch", "combine")
            )
        except RuntimeError as error:
            raise HandshakeError(
                f"seat {self.seat}: process groups of epoch {self.epoch} not formed: {error}"
            ) from error

    def _options(self, host: str) -> Any:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=self._deadline_s)
        return options

    # What the progress threads do.

    def _progress(self, peer: _Peer) -> None:
        try:
            while True:
                self._receive(peer, Announcement.unpack(recv_frame(peer.link), self.max_rows))
                os.eventfd_write(self._bell, 1)
        except Exception as error:  # any end of a link is the same evidence
            peer.failure = str(error)
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def _receive(self, peer: _Peer, frame: Announcement) -> None:
        if frame.type is FrameType.STATE:
            peer.state = SeatState.unpack(frame.value)
        elif frame.type is FrameType.ROUND:
            packed = torch.empty(self._packed_bytes(frame.num_tokens), dtype=torch.uint8)
            self._take(self._dispatch, peer, packed)
            peer.rounds.append((frame, packed))
        else:
            reply = torch.empty((frame.num_tokens, self._shape.hidden_size), dtype=torch.float32)
            self._take(self._combine, peer, reply)
            if frame.epoch == self.epoch:
                peer.replies[frame.value] = reply

    def _take(self, group: Any, peer: _Peer, tensor: torch.Tensor) -> None:
        if tensor.numel():
            group.recv([tensor], peer.rank, TAG).wait(timedelta(seconds=self._deadline_s))

    # A round is one tensor of bytes: weights, ids, hidden states (the widest alignment first).

    def _packed_bytes(self, num_tokens: int) -> int:
        shape = self._shape
        return num_tokens * (8 * shape.top_k + shape.hidden_size * shape.dtype.itemsize)

    def _views(
        self, packed: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        split = 4 * num_tokens * self._shape.top_k
        return (
            packed[:split].view(torch.float32).view(num_tokens, -1),
            packed[split : 2 * split].view(torch.int32).view(num_tokens, -1),
            packed[2 * split :].view(self._shape.dtype).view(num_tokens, -1),
        )

    # What the rank's thread does.

    def reserve(self, peer: int, num_tokens: int) -> RowBuffer:
        box, shape = self._peers[peer], self._shape
        assert num_tokens <= self.max_rows, "the caller cuts rounds to max_rows"
        assert box.posted - box.released < shape.num_slots, "release a reply before posting"
        if box.draft is None or box.draft.capacity < num_tokens:
            box.draft = RowBuffer.empty(num_tokens, shape.hidden_size, shape.top_k, shape.dtype)
        return box.draft

    def post(self, peer: int, layer: int, num_tokens: int, *, big: bool) -> int:
        box = self._peers[peer]
        if box.failure is not None:
            raise self._died(box)
        assert box.draft is not None, "a round is reserved first"
        assert 0 < num_tokens <= box.draft.capacity, (num_tokens, box.draft.capacity)
        sequence = box.posted + 1
        packed = torch.empty(self._packed_bytes(num_tokens), dtype=torch.uint8)
        draft = Rows(box.draft, num_tokens)
        sources = (draft.topk_weights, draft.topk_ids, draft.hidden_states)
        for view, source in zip(self._views(packed, num_tokens), sources, strict=True):
            view.copy_(source)
        frame = Announcement(
            FrameType.ROUND, self.epoch, sequence, layer, num_tokens, big, RoundKind.EXPERTS
        )
        try:
            self._send_frame(box, frame)
            work = self._dispatch.send([packed], box.rank, TAG)
        except (OSError, RuntimeError) as error:
            box.failure = str(error)
            raise self._died(box) from error
        box.sending[sequence % self._shape.num_slots] = (work, packed)
        box.posted = sequence
        return sequence

    def _send_frame(self, box: _Peer, frame: Announcement) -> None:
        """Send without waiting for a peer that does not read, except up to the deadline."""
        data = memoryview(frame.pack())
        while data:
            try:
                data = data[box.link.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not wait_writable(box.link.fileno(), self._deadline_s):
                    raise ConnectionError("peer does not read its link") from None

    def poll(self, peer: int) -> Round | None:
        box = self._peers[peer]
        while box.current is None and box.rounds:
            frame, packed = box.rounds[0]
            if frame.epoch > self.epoch:
                return None  # held until this seat adopts that epoch
            box.rounds.popleft()
            if frame.epoch < self.epoch:
                self.num_stale += 1
                continue
            weights, ids, hidden_states = self._views(packed, frame.num_tokens)
            out = torch.empty(hidden_states.shape, dtype=torch.float32)
            box.current = Round(
                header=RoundHeader(
                    epoch=frame.epoch,
                    source=peer,
                    layer=frame.layer,
                    sequence=frame.value,
                    num_tokens=frame.num_tokens,
                    big=frame.big,
                    kind=RoundKind(frame.kind),
                ),
                rows=Rows(RowBuffer(hidden_states, ids, weights, out), frame.num_tokens),
            )
        return box.current

    def reply(self, round: Round) -> None:
        header = round.header
        box = self._peers[header.source]
        assert round is box.current, "rounds of one peer are answered in order"
        box.current = None
        if box.failure is not None:
            return
        frame = Announcement(
            FrameType.REPLY, self.epoch, header.sequence, header.layer, header.num_tokens
        )
        try:
            self._send_frame(box, frame)
            work = self._combine.send([round.rows.out], box.rank, TAG)
        except (OSError, RuntimeError) as error:
            box.failure = str(error)
            return
        box.replying[header.sequence % self._shape.num_slots] = (work, round.rows.out)

    def poll_reply(self, peer: int, sequence: int) -> torch.Tensor | None:
        box = self._peers[peer]
        reply = box.replies.get(sequence)
        if reply is None and box.failure is not None:
            raise self._died(box)
        return reply

    def release(self, peer: int, sequence: int) -> None:
        box = self._peers[peer]
        assert sequence == box.released + 1, "replies are released in order"
        box.released = sequence
        del box.replies[sequence]

    def publish(self, state: SeatState) -> None:
        frame = Announcement(FrameType.STATE, self.epoch, state.pack())
        for box in self._peers.values():
            if box.failure is None:
                try:
                    self._send_frame(box, frame)
                except OSError as error:
                    box.failure = str(error)

    def peer_state(self, peer: int) -> SeatState:
        box = self._peers[peer]
        return box.state if box.failure is None else GONE

    def block(self, timeout_s: float, wake_fds: Sequence[int] = ()) -> bool:
        ready = readable([self._bell, *wake_fds], timeout_s)
        if self._bell in ready:
            os.eventfd_read(self._bell)
            for box in self._peers.values():
                if box.failure is not None and not box.reported:
                    box.reported = True
                    os.eventfd_write(self._bell, 1)  # there may be more than one
                    raise self._died(box)
        return any(fd in ready for fd in wake_fds)

    def _died(self, box: _Peer) -> RankDied:
        return RankDied(
            f"seat {self.seat}: seat {box.seat} closed its link (epoch {self.epoch}), it is gone: "
            f"{box.failure}"
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for box in self._peers.values():
            try:
                box.link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the peer was first
        threads = [box.thread for box in self._peers.values() if box.thread is not None]
        for thread in threads:
            thread.join(self._deadline_s)
        for box in self._peers.values():
            box.link.close()
        self._dispatch = self._combine = None
        if not any(thread.is_alive() for thread in threads):
            os.close(self._bell)
