"""What the supervisor knows of one rank, and what that says about whether the rank works.

Pure bookkeeping: numbers come from the rank's messages, the clock from the caller.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from coterie.errors import RuntimeFailure
from coterie.runtime.cluster.rank_connection import RankConnection
from coterie.runtime.messages import Heartbeat, Loaded, RankStatus, SeatAddress
from coterie.runtime.spec import RankSpec

TURNING = ("stepping", "serving", "idle")
"""States in which the main loop of a sound rank, or its router, turns at least twice a second."""


@dataclass
class Seat:
    """One rank."""

    spec: RankSpec
    address: SeatAddress | None = None
    engine: RankConnection | None = None
    heartbeat_link: RankConnection | None = None
    loaded: Loaded | None = None
    heartbeat: Heartbeat | None = None
    heartbeat_at_s: float = 0.0
    progress_at_s: float = 0.0
    status: RankStatus | None = None
    lost: RuntimeFailure | None = None
    """Why this rank is not a member any more."""
    waiter: "asyncio.Future[Any] | None" = None
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)

    def where(self, epoch: int) -> str:
        """For messages: which process, and how far it was."""
        pid = f"pid {self.address.pid}, " if self.address is not None else ""
        step = f"step {self.heartbeat.step}" if self.heartbeat is not None else "no step"
        return f"{pid}{step}, epoch {epoch}"

    def beat(self, beat: Heartbeat, now: float) -> None:
        last = self.heartbeat
        self.heartbeat, self.heartbeat_at_s = beat, now
        moved = last is None or (beat.tick, beat.step, beat.layer) != (
            last.tick,
            last.step,
            last.layer,
        )
        if moved or beat.state not in TURNING:
            self.progress_at_s = now

    def quiet_s(self, now: float) -> float:
        """For how long it has sent nothing, or the same again and again."""
        return now - min(self.heartbeat_at_s, self.progress_at_s)

    def complaint(self, now: float, epoch: int) -> str:
        """In words what ``quiet_s`` measures."""
        silent, still = now - self.heartbeat_at_s, now - self.progress_at_s
        # A stuck rank still beats; a silent one stands still too, as far as anybody knows.
        how = f"silent for {silent:.1f} s" if still <= 2 * silent else f"stuck for {still:.1f} s"
        return f"rank {self.spec.seat} is {how} ({self.where(epoch)})"


def quietest_expert(seats: Iterable[Seat], witness: Seat, now: float) -> Seat | None:
    """Of the ranks that a step of ``witness`` can wait for, the one that has been quiet longest."""
    suspects = [
        seat
        for seat in seats
        if seat is not witness and seat.lost is None and "experts" in seat.spec.roles
    ]
    return max(suspects, key=lambda seat: seat.quiet_s(now), default=None)
