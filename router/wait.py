"""The one wait function: predicate, deadline, epoch. It serves rounds while it waits.

Used for replies, gathers, step alignment and idling alike. Serving is a leaf (it never waits), so
waits never form a cycle. Inside a step a wait yields for about the time that ranks differ in a
layer, then blocks for short times: a blocked CPU halts and takes long to come back, with cold
caches, but a pure yield loop would starve a busy neighbour. Elsewhere about 20 yields come first.
A block that missed its bell costs no more than its timeout.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence

from coterie.errors import EpochChanged, RankDied
from coterie.router.counters import RouterCounters
from coterie.router.transports.base import Transport

YIELDS = 20
SPIN_S = 0.001
"""How long a wait inside a step yields before each block. Most replies come within it; at 0.3 ms
every other wait of a layer still blocked."""
STEP_BLOCK_S = 0.0005
"""Longest block inside a step."""
CHECK_S = 0.05
"""How often the peers that are waited for are checked for signs of life."""
CAP_FACTOR = 10.0
"""A wait ends after this many times the fault time, whatever progress the peer shows."""


class Waiter:
    """Waits of one rank within its step loop. One thread only.

    Attributes:
        step, layer, tick: where the rank is and a counter of loop turns, for messages and for a
            heartbeat thread to read.
        newest_epoch: set by any thread once the membership has moved on; running waits then raise.
        deaths: closed links noticed while waiting for something else, reported by the idle wait.
    """

    def __init__(self, transport: Transport, counters: RouterCounters, fault_s: float) -> None:
        self.transport = transport
        self.step = 0
        self.layer = 0
        self.tick = 0
        self.newest_epoch = transport.epoch
        self.deaths: list[RankDied] = []
        self._counters = counters
        self._fault_s = fault_s

    def wait(
        self,
        done: Callable[[], bool],
        serve: Callable[[], bool],
        *,
        what: str,
        limit_s: float | None = None,
        waiting_for: Callable[[], Iterable[int]] | None = None,
        wake_fds: Sequence[int] = (),
        spin_s: float = SPIN_S,
        block_s: float = STEP_BLOCK_S,
    ) -> bool:
        """Serve until ``done()``; False if ``limit_s`` passed or a wake fd is readable.

        Args:
            done: cheap predicate, called at every turn.
            serve: does one leaf of work; True if it did any.
            what: for error messages, such as "the replies".
            limit_s: end of a wait that may be given up.
            waiting_for: seats without which the wait cannot end; makes it a wait with a deadline.
            wake_fds: give up as soon as one of these is readable.
            spin_s: how long to yield, after ``YIELDS`` yields at least, before each block.
            block_s: longest single block.

        Raises:
            RankDied: a seat of ``waiting_for`` is gone or made no progress for ``fault_s``.
            EpochChanged: the membership moved on.
        Blocks: until one of the above.
        """
        start = time.perf_counter()
        next_check = start + CHECK_S
        watch = _Watch(self, what, start, waiting_for) if waiting_for else None
        yields, idle_since = 0, start
        while not done():
            self.tick += 1
            served = serve()
            now = time.perf_counter()
            if limit_s is not None and now - start >= limit_s:
                return False
            if now >= next_check:
                next_check = now + CHECK_S
                self._check_epoch()
                self._block(0.0, ())
                if watch:
                    watch.check(now, self._fault_s)
            if served:
                yields, idle_since = 0, now
                if wake_fds and self._block(0.0, wake_fds):
                    return False
                continue
            yields += 1
            if yields <= YIELDS or now - idle_since < spin_s:
                os.sched_yield()
                continue
            left = block_s if limit_s is None else min(block_s, start + limit_s - now)
            self._counters.sleeps += 1
            if self._block(max(left, 0.0), wake_fds):
                return False
        return True

    def timed(
        self, done: Callable[[], bool], serve: Callable[[], bool], *, what: str, limit_s: float
    ) -> float:
        """A wait that may be given up; returns how long it took, seconds."""
        start = time.perf_counter()
        self.wait(done, serve, what=what, limit_s=limit_s)
        return time.perf_counter() - start

    def _block(self, timeout_s: float, wake_fds: Sequence[int]) -> bool:
        try:
            return self.transport.block(timeout_s, wake_fds)
        except RankDied as error:
            # Only a wait that needs this seat may fail for it: its predicate will raise.
            self.deaths.append(error)
            return False

    def _check_epoch(self) -> None:
        if self.newest_epoch > self.transport.epoch:
            raise EpochChanged(
                f"seat {self.transport.seat}: step {self.step} of epoch {self.transport.epoch} "
                f"dropped, the membership is at epoch {self.newest_epoch}"
            )


class _Watch:
    """Judges whether the seats that one wait depends on still make progress."""

    def __init__(
        self, owner: Waiter, what: str, start: float, seats: Callable[[], Iterable[int]]
    ) -> None:
        self._owner = owner
        self._what = what
        self._start = start
        self._seats = seats
        self._seen: dict[int, tuple[object, float]] = {}

    def check(self, now: float, fault_s: float) -> None:
        owner = self._owner
        for seat in self._seats():
            state = owner.transport.peer_state(seat)
            last, since = self._seen.get(seat, (None, self._start))
            if last is not None and state != last:
                since = now
            self._seen[seat] = (state, since)
            if now - since > fault_s or now - self._start > fault_s * CAP_FACTOR:
                raise RankDied(
                    f"seat {owner.transport.seat}: seat {seat} did not answer for "
                    f"{now - since:.1f} s while waiting for {self._what} (step {owner.step}, "
                    f"layer {owner.layer}, epoch {owner.transport.epoch})"
                )
