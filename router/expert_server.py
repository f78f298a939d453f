"""Answers rounds: small ones in (merged) passes, big ones as jobs cut by experts.

Every function here but ``gather`` is a leaf: it computes and replies, and never waits. Merging the
rows of several ranks into one pass reads the weights once for all; results are functions of single
rows, so merging never changes a value.
"""

import time
from collections.abc import Sequence

from coterie.experts.grouped import GroupedExperts
from coterie.experts.rows import Rows
from coterie.router.alignment import PassPredictor
from coterie.router.counters import RouterCounters
from coterie.router.round import Round
from coterie.router.state import SeatState, StepKind
from coterie.router.transports.base import Transport
from coterie.router.wait import Waiter

LARGE_PIECE_ROWS = 256
"""Jobs of at least this many rows advance one expert a piece, smaller ones two."""


class ExpertServer:
    """The expert role of one rank."""

    def __init__(
        self,
        transport: Transport,
        experts: GroupedExperts,
        sources: Sequence[int],
        waiter: Waiter,
        counters: RouterCounters,
    ) -> None:
        self._transport = transport
        self._experts = experts
        self._sources = tuple(sources)
        self._waiter = waiter
        self._counters = counters
        self._predictor = PassPredictor()
        self._lapsed: dict[int, SeatState] = {}
        """Where a seat stood when a window passed without it; not waited for until it moves."""
        self._job: Round | None = None
        self._job_next = 0
        self._job_order = list(sources)

    def next_small(self, skip_layer: int = -1) -> Round | None:
        """A small round that waits for an answer, of any layer but ``skip_layer``."""
        for seat in self._sources:
            round = self._transport.poll(seat)
            if round is not None and not round.header.big and round.header.layer != skip_layer:
                return round
        return None

    def serve_small(self, skip_layer: int = -1) -> bool:
        """Answer the small rounds of one layer that are here; False if there are none."""
        first = self.next_small(skip_layer)
        if first is None:
            return False
        layer = first.header.layer
        waiting = [r for r in map(self._transport.poll, self._sources) if r is not None]
        self.run_pass(layer, None, [r for r in waiting if _is_small(r, layer)])
        return True

    def serve(self) -> bool:
        """One leaf of work: small rounds first, then a piece of a job."""
        return self.serve_small() or self.run_job_piece()

    def gather(self, layer: int) -> list[Round]:
        """Collect the small rounds of ``layer``, waiting for seats that are about to send one.

        Waited for are seats inside a decode step of this epoch whose published layer is at most
        ``layer``; a seat publishes the next layer once it has posted its rounds, so one without
        tokens for this rank is not waited for. Meanwhile other layers are served at once.

        Blocks: at most the gather window (two predicted merged passes).
        """
        found: dict[int, Round] = {}
        expected: list[int] = []

        def all_here() -> bool:
            expected.clear()
            for seat in self._sources:
                if seat in found:
                    continue
                state = self._transport.peer_state(seat)  # before the round: rounds come first
                round = self._transport.poll(seat)
                if round is not None and _is_small(round, layer):
                    found[seat] = round
                elif self._may_send(seat, state, layer):
                    expected.append(seat)
            return not expected

        if self._sources and not all_here():
            start = time.perf_counter()
            in_time = self._waiter.wait(
                all_here,
                lambda: self.serve_small(skip_layer=layer),
                what="a gather",
                limit_s=self._predictor.window_s(),
                block_s=0.0001,
            )
            self._counters.gather_wait_s += time.perf_counter() - start
            if not in_time:
                self._counters.gather_timeouts += 1
                for seat in expected:
                    self._lapsed[seat] = self._transport.peer_state(seat)
        return [found[seat] for seat in sorted(found)]

    def _may_send(self, seat: int, state: SeatState, layer: int) -> bool:
        return (
            state.kind is StepKind.DECODE
            and state.epoch == self._transport.epoch
            and state.layer <= layer
            and self._lapsed.get(seat) != state
        )

    def run_pass(self, layer: int, own: Rows | None, rounds: Sequence[Round]) -> None:
        """One pass over the layer's local experts for own rows and rounds; replies to the latter.

        All rows stay where they lie; each ``out`` receives its partial sums.
        """
        segments = [round.rows for round in rounds]
        if own is not None:
            segments.append(own)
        if not segments:
            return
        seconds = self._compute(layer, segments)
        for round in rounds:
            self._transport.reply(round)
        self._count_pass(seconds, len(rounds), merged=len(segments) > 1)

    def _count_pass(self, seconds: float, served: int, *, merged: bool) -> None:
        counters = self._counters
        self._predictor.observe(seconds, merged=merged)
        counters.expert_passes += 1
        counters.served_rounds += served
        if merged:
            counters.merged_passes += 1
        else:
            counters.lone_passes += 1

    def _compute(
        self, layer: int, segments: Sequence[Rows], first: int = 0, last: int | None = None
    ) -> float:
        start = time.perf_counter()
        self._experts.forward(layer, segments, first, last)
        seconds = time.perf_counter() - start
        self._counters.kernel_s += seconds
        self._waiter.tick += 1
        return seconds

    def run_job_piece(self) -> bool:
        """The next one or two experts of the oldest big round; False if there is none."""
        job = self._job
        if job is None:
            job = self._next_big()
            if job is None:
                return False
            self._job, self._job_next = job, 0
        first = self._job_next
        last = min(first + _piece(job.header.num_tokens), self._experts.num_local)
        self._compute(job.header.layer, [job.rows], first, last)
        self._counters.job_pieces += 1
        self._job_next = last
        if last == self._experts.num_local:
            self._job = None
            self._transport.reply(job)
            self._counters.expert_passes += 1
            self._counters.served_rounds += 1
        return True

    def _next_big(self) -> Round | None:
        for seat in self._job_order:
            round = self._transport.poll(seat)
            if round is not None and round.header.big:
                self._job_order.remove(seat)
                self._job_order.append(seat)  # the one just served goes to the end of the line
                return round
        return None

    def run_own_pieces(self, layer: int, own: Rows) -> None:
        """The own rows of a big step by pieces of experts, serving small rounds in between."""
        piece = _piece(own.num_tokens)
        for first in range(0, self._experts.num_local, piece):
            last = min(first + piece, self._experts.num_local)
            self._compute(layer, [own], first, last)
            self.serve_small()
        self._counters.expert_passes += 1


def _piece(num_tokens: int) -> int:
    return 1 if num_tokens >= LARGE_PIECE_ROWS else 2


def _is_small(round: Round, layer: int) -> bool:
    return not round.header.big and round.header.layer == layer
