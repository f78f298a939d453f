"""The transport of a rank without peers: all experts are its own, or there are none."""

from collections.abc import Sequence
from typing import NoReturn

import torch

from coterie.experts.rows import RowBuffer
from coterie.router.round import Round
from coterie.router.state import SeatState
from coterie.router.transports.readiness import readable


class LocalTransport:
    """Nobody to send to; ``block`` still waits for the engine."""

    def __init__(self, seat: int, epoch: int = 1, max_rows: int = 4096) -> None:
        self.seat = seat
        self.epoch = epoch
        self.peers: tuple[int, ...] = ()
        self.max_rows = max_rows
        self.num_stale = 0

    def reserve(self, peer: int, num_tokens: int) -> RowBuffer:
        self._no_peer(peer)

    def post(self, peer: int, layer: int, num_tokens: int, *, big: bool) -> int:
        self._no_peer(peer)

    def poll(self, peer: int) -> Round | None:
        self._no_peer(peer)

    def reply(self, round: Round) -> None:
        self._no_peer(round.header.source)

    def poll_reply(self, peer: int, sequence: int) -> torch.Tensor | None:
        self._no_peer(peer)

    def release(self, peer: int, sequence: int) -> None:
        self._no_peer(peer)

    def publish(self, state: SeatState) -> None:
        """Nobody looks."""

    def peer_state(self, peer: int) -> SeatState:
        self._no_peer(peer)

    def block(self, timeout_s: float, wake_fds: Sequence[int] = ()) -> bool:
        return bool(readable(wake_fds, timeout_s))

    def close(self) -> None:
        """Nothing to release."""

    def _no_peer(self, peer: int) -> NoReturn:
        raise AssertionError(f"seat {self.seat} has no peers, asked for seat {peer}")
