"""A rank's router: the facade over dispatcher, expert server, waits and transport.

The step loop calls begin_step / end_step / align / serve_until_wake, MoE layers call forward, the
decoder calls poll between pieces of big steps. One thread only; a heartbeat thread may read
``step``, ``layer`` and ``tick``. Dense models use it with a ``LocalTransport`` and no placement.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from coterie.errors import ConfigError
from coterie.experts.config import MoEConfig
from coterie.experts.grouped import GroupedExperts
from coterie.experts.kernels.base import Kernels
from coterie.experts.placement import ExpertPlacement
from coterie.experts.rows import Rows
from coterie.router.alignment import StepAligner
from coterie.router.counters import RouterCounters
from coterie.router.dispatcher import TokenDispatcher, routing_tables
from coterie.router.expert_server import ExpertServer
from coterie.router.gate import TopKOutput
from coterie.router.state import SeatState, StepKind
from coterie.router.transports.base import Transport
from coterie.router.transports.readiness import readable
from coterie.router.wait import Waiter

SIGN_OF_LIFE_S = 0.2
"""How often a rank that only serves moves its published word."""


class TokenRouter:
    """Carries the tokens of one rank to the experts and back, and serves those of others."""

    def __init__(
        self,
        *,
        seat: int,
        placement: ExpertPlacement | None,
        attention_seats: Sequence[int],
        transport: Transport,
        experts: GroupedExperts | None,
        kernels: Kernels,
        moe: MoEConfig | None,
        dtype: torch.dtype,
        fault_s: float,
    ) -> None:
        """Args:
        placement: None for dense models.
        experts: this rank's experts, None on an attention-only rank.
        dtype: model dtype; everything dispatched is cast to it, own rows included.
        fault_s: longest wait for a peer that makes no progress, seconds.
        """
        if placement is not None and experts is None and seat in placement.seats:
            raise ConfigError(f"seat {seat} is placed to hold experts but has none loaded")
        self.seat = seat
        self._placement = placement
        self._attention_seats = tuple(attention_seats)
        self._experts = experts
        self._kernels = kernels
        self._dtype = dtype
        self._fault_s = fault_s
        self._counters = RouterCounters()
        self._old_stale = 0
        num_experts = moe.num_experts if moe is not None else 0
        self._gate_tokens = np.zeros(num_experts + 1, dtype=np.int64)
        self._chosen: list[torch.Tensor] = []
        self._tables = routing_tables(placement, seat) if placement is not None else None
        self._attach(transport)

    def _attach(self, transport: Transport) -> None:
        self._transport = transport
        self._waiter = Waiter(transport, self._counters, self._fault_s)
        others = [seat for seat in self._attention_seats if seat in transport.peers]
        self._aligner = StepAligner(transport, self._waiter, others, self._counters)
        self._dispatcher = None
        if self._tables is not None:
            self._dispatcher = TokenDispatcher(transport, self._tables, self._kernels, self._dtype)
        self._server = None
        if self._experts is not None:
            self._server = ExpertServer(
                transport, self._experts, others, self._waiter, self._counters
            )
        self._serve: Callable[[], bool] = self._server.serve if self._server else _nothing
        self._kind = StepKind.IDLE
        self._layer = 0
        self._step_start = 0.0
        self._passes_before = (0, 0)
        self._last_sign = 0.0
        self._signs = 0
        self._publish(StepKind.IDLE, 0)

    def adopt(self, transport: Transport) -> None:
        """Go on with the transport of a new epoch, between steps; closes the old one."""
        step = self.step
        self._old_stale += self._transport.num_stale
        self._transport.close()
        self._attach(transport)
        self._waiter.step = step

    @property
    def step(self) -> int:
        return self._waiter.step

    @property
    def layer(self) -> int:
        return self._waiter.layer

    @property
    def tick(self) -> int:
        """Moves whenever the router does anything, waiting included."""
        return self._waiter.tick

    @property
    def epoch(self) -> int:
        return self._transport.epoch

    def fence(self, newest_epoch: int) -> None:
        """From any thread: the membership moved on; waits of older epochs raise EpochChanged."""
        self._waiter.newest_epoch = newest_epoch

    def begin_step(self, step: int, *, big: bool) -> None:
        """Enter a step; ``big`` steps (long prefill) are not waited for by anybody."""
        self._waiter.step = step
        self._waiter.layer = 0
        self._step_start = time.perf_counter()
        self._passes_before = (self._counters.expert_passes, self._counters.merged_passes)
        self._publish(StepKind.BIG if big else StepKind.DECODE, 0)

    def enter_layer(self, layer: int) -> None:
        """Publish that this rank is about to compute what leads to MoE layer ``layer``."""
        self._waiter.layer = layer
        if layer != self._layer:
            self._publish(self._kind, layer)

    def forward(self, layer: int, hidden_states: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        """Experts of one layer for the rows of this rank, serving other ranks meanwhile.

        Args:
            layer: index among the MoE layers.
            hidden_states: ``[num_tokens, hidden_size]`` float32.
            topk: logical expert ids and weights of these rows.

        Returns:
            ``[num_tokens, hidden_size]`` float32, new.

        Raises:
            RankDied: an expert rank is gone or made no progress for ``fault_s``.
            EpochChanged: the membership moved on meanwhile.
        Blocks: until all replies are here.
        """
        start, kernel_before = time.perf_counter(), self._counters.kernel_s
        self.enter_layer(layer)
        self._aligner.saw_layer(layer)
        self._chosen.append(topk.topk_ids)  # counted once a step: it is slow beside a cold cache
        output = self._exchange_all(layer, hidden_states, topk)
        waited = time.perf_counter() - start - (self._counters.kernel_s - kernel_before)
        if self._kind is StepKind.BIG:
            self._counters.big_exchange_s += waited
        else:
            self._counters.exchange_s += waited
        return output

    def _exchange_all(self, layer: int, rows: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        """One exchange if the rows fit into a round, else one for each ``max_rows`` of them."""
        num_tokens, max_rows = rows.shape[0], self._transport.max_rows
        if 0 < num_tokens <= max_rows:
            return self._exchange(layer, rows, topk, last=True)
        outputs = [torch.zeros((0, rows.shape[1]), dtype=torch.float32)]
        for first in range(0, num_tokens, max_rows):
            last = min(first + max_rows, num_tokens)
            part = TopKOutput(topk.topk_ids[first:last], topk.topk_weights[first:last])
            outputs.append(self._exchange(layer, rows[first:last], part, last=last == num_tokens))
        if not num_tokens:
            self._publish(self._kind, layer + 1)
        return torch.cat(outputs)

    def _exchange(
        self, layer: int, rows: torch.Tensor, topk: TopKOutput, *, last: bool
    ) -> torch.Tensor:
        """Dispatch, experts, combine for at most ``max_rows`` rows."""
        dispatcher = self._dispatcher
        assert dispatcher is not None, "a dense model has no MoE layers"
        big = self._kind is StepKind.BIG
        if not dispatcher.drain():  # left by an aborted step
            self._wait_for_replies(dispatcher.drain)
        handle = dispatcher.dispatch(layer, rows, topk, big=big)
        if last:
            # All rounds of this layer are out: gathers need not expect another one.
            self._publish(self._kind, layer + 1)
        if self._server is not None:
            self._run_experts(self._server, layer, handle.own, big)
        if handle.sent:
            self._wait_for_replies(dispatcher.replies_here(handle))
        elif handle.own is None:
            return torch.zeros_like(rows)
        return dispatcher.combine(handle)

    @staticmethod
    def _run_experts(server: ExpertServer, layer: int, own: Rows | None, big: bool) -> None:
        if not big:
            server.run_pass(layer, own, server.gather(layer))
            server.run_job_piece()  # a floor, so that decode cannot starve a peer's prefill
        elif own is not None:
            server.run_own_pieces(layer, own)

    def _wait_for_replies(self, done: Callable[[], bool]) -> None:
        assert self._dispatcher is not None
        self._waiter.wait(
            done, self._serve, what="replies", waiting_for=self._dispatcher.unanswered
        )

    def end_step(self, *, more_work: bool) -> None:
        """Leave the step after its commit; ``more_work``: another one follows at once."""
        seconds = time.perf_counter() - self._step_start
        self._count_chosen()
        counters = self._counters
        counters.steps += 1
        if self._kind is StepKind.BIG:
            counters.big_steps += 1
            counters.big_step_s += seconds
        else:
            counters.decode_steps += 1
            counters.step_s += seconds
            passes, merged = self._passes_before
            self._aligner.step_done(
                seconds, counters.expert_passes - passes, counters.merged_passes - merged
            )
        self._publish(StepKind.BETWEEN if more_work else StepKind.IDLE, 0)

    def _count_chosen(self) -> None:
        if self._chosen:
            ids = torch.cat(self._chosen).numpy().ravel()
            self._gate_tokens += np.bincount(ids + 1, minlength=len(self._gate_tokens))
            self._chosen.clear()

    def abort_step(self) -> None:
        """Drop the running step; its rounds may still be answered and are then thrown away."""
        self._chosen.clear()
        self._publish(StepKind.IDLE, 0)

    def poll(self) -> None:
        """Serve waiting small rounds: the yield point of big steps. Never waits."""
        if self._server is not None:
            self._server.serve_small()

    def align(self) -> None:
        """Before ``begin_step``: let a peer that is mid-step reach its boundary first.

        Blocks: at most one median decode step, serving; returns at once if nobody is mid-step.
        """
        self._aligner.align(self._serve)

    def serve_until_wake(self, wake_fds: Sequence[int], timeout_s: float) -> bool:
        """Serve others while this rank has no step to run; sleep when there is nothing to do.

        Returns:
            True as soon as one of ``wake_fds`` is readable, False after ``timeout_s``.

        Raises:
            RankDied: the link of a peer closed; reported once per peer.
            EpochChanged: the membership moved on.
        Blocks: at most ``timeout_s``, plus one piece of work.
        """
        waiter = self._waiter
        if self._kind is not StepKind.IDLE:
            self._publish(StepKind.IDLE, 0)
        waiter.wait(
            lambda: bool(waiter.deaths),
            self._serve_idle,
            what="work",
            limit_s=timeout_s,
            wake_fds=wake_fds,
            spin_s=0.0,
            block_s=timeout_s,
        )
        if waiter.deaths:
            raise waiter.deaths.pop(0)
        return bool(wake_fds and readable(wake_fds, 0.0))

    def _serve_idle(self) -> bool:
        """Like serve, but with nothing else to do it can afford to gather."""
        server = self._server
        if server is None:
            return False
        first = server.next_small()
        if first is not None:
            layer = first.header.layer
            server.run_pass(layer, None, server.gather(layer))
            server.run_job_piece()
        elif not server.run_job_piece():
            return False
        now = time.perf_counter()
        if now - self._last_sign > SIGN_OF_LIFE_S:
            self._last_sign = now
            self._signs += 1
            self._publish(StepKind.IDLE, 0)
        return True

    def _publish(self, kind: StepKind, layer: int) -> None:
        self._kind = kind
        self._layer = layer
        self._waiter.tick += 1
        # An idle rank is in no step; its word moves while it serves, as a sign of life.
        step = self._signs if kind is StepKind.IDLE else self._waiter.step
        self._transport.publish(
            SeatState(epoch=self._transport.epoch, step=step, layer=layer, kind=kind)
        )

    def counters(self) -> dict[str, float]:
        """Cumulative counts and seconds, see ``RouterCounters``."""
        self._counters.stale_messages = self._old_stale + self._transport.num_stale
        return self._counters.as_dict()

    def gate_tokens(self) -> list[int]:
        """Real tokens per logical expert chosen by this rank's gates in finished steps.

        Summed over layers; a step that is aborted and run again counts once.
        """
        return self._gate_tokens[1:].tolist()

    def expert_tokens(self) -> list[int]:
        """Real tokens per local physical expert computed here, all layers together."""
        return list(self._experts.tokens) if self._experts is not None else []

    def close(self) -> None:
        """Close the transport; idempotent."""
        self._transport.close()


def _nothing() -> bool:
    return False
