"""How long to wait for others: the gather window and the start of a step.

Two preferences with bounds, never barriers. The window lets rounds of one layer meet in one pass
over the weights; alignment lets ranks start steps together, because drift hardly heals by itself.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from coterie.router.counters import RouterCounters
from coterie.router.state import SeatState, StepKind
from coterie.router.transports.base import Transport
from coterie.router.wait import Waiter

WINDOW_PASSES = 2.0
MIN_WINDOW_S = 0.0005
MAX_WINDOW_S = 0.05
FIRST_BOUND_S = 0.2
"""Alignment bound of a rank that has not run a decode step yet."""


class PassPredictor:
    """Predicted time of a merged pass, learned from merged passes only.

    An average over lone passes would shrink until no window is long enough to merge again.
    """

    def __init__(self) -> None:
        self._merged_s: float | None = None
        self._lone_s = 0.0

    def observe(self, seconds: float, *, merged: bool) -> None:
        if not merged:
            self._lone_s += (seconds - self._lone_s) / 8
        elif self._merged_s is None:
            self._merged_s = seconds
        else:
            # One preempted pass must not open the window for a whole step.
            seconds = min(seconds, 4 * self._merged_s)
            self._merged_s += (seconds - self._merged_s) / 8

    def window_s(self) -> float:
        """Longest useful wait for the rounds of a layer, seconds."""
        predicted = self._merged_s if self._merged_s is not None else 2 * self._lone_s
        return min(max(WINDOW_PASSES * predicted, MIN_WINDOW_S), MAX_WINDOW_S)


class StepAligner:
    """Waits, serving, for a peer's step boundary, at most one median decode step per drift."""

    def __init__(
        self, transport: Transport, waiter: Waiter, seats: Sequence[int], counters: RouterCounters
    ) -> None:
        self._transport = transport
        self._waiter = waiter
        self._seats = tuple(seats)
        self._counters = counters
        self._recent_s: deque[float] = deque(maxlen=15)
        self._paid: set[int] = set()
        """Peers whose present drift has been waited for; cleared once passes merge again."""
        self._num_layers = 1

    def saw_layer(self, layer: int) -> None:
        self._num_layers = max(self._num_layers, layer + 1)

    def step_done(self, seconds: float, passes: int, merged: int) -> None:
        """Learn from a finished decode step."""
        self._recent_s.append(seconds)
        if 2 * merged >= passes > 0:
            self._paid.clear()

    def align(self, serve: Callable[[], bool]) -> None:
        """Wait until the peers that are deep in a decode step have reached their boundary."""
        waiting: dict[int, SeatState] = {}
        for seat in self._seats:
            state = self._transport.peer_state(seat)
            if not self._deep(state):
                if state.kind in (StepKind.IDLE, StepKind.BIG):
                    self._paid.discard(seat)
            elif seat not in self._paid:
                waiting[seat] = state
        if not waiting:
            return
        bound = statistics.median(self._recent_s) if self._recent_s else FIRST_BOUND_S
        self._counters.aligns += 1
        self._paid.update(waiting)
        self._counters.align_wait_s += self._waiter.timed(
            lambda: not any(self._same_step(seat, state) for seat, state in waiting.items()),
            serve,
            what="the peers' step boundary",
            limit_s=bound,
        )

    def _deep(self, state: SeatState) -> bool:
        """Mid-step, and too far in for the gather windows to pull us level cheaply.

        A seat publishes the next layer as soon as it has posted one, so layer 1 may still be in
        its first exchange.
        """
        near = max(1, self._num_layers // 8)
        return (
            state.kind is StepKind.DECODE
            and state.epoch == self._transport.epoch
            and state.layer > near
        )

    def _same_step(self, seat: int, state: SeatState) -> bool:
        now = self._transport.peer_state(seat)
        return now.kind is StepKind.DECODE and now.step == state.step
