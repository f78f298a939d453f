"""AsyncEngine: admits requests, binds them to ranks, turns step outputs into streams.

Lives on one event loop and does nothing between events. The supervisor below it owns the ranks;
HTTP, RPC and LLM above it see only ``submit`` and a few questions.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    RuntimeFailure,
)
from coterie.runtime.cluster.supervisor import ProgressCallback
from coterie.runtime.config import EngineConfig
from coterie.runtime.engine import status
from coterie.runtime.engine.admission import Admission
from coterie.runtime.engine.choice import Choice
from coterie.runtime.engine.coordinator import Coordinator
from coterie.runtime.engine.deployment import MIN_TEARDOWN_S, Deployment, start_deployment
from coterie.runtime.engine.output_processor import process
from coterie.runtime.engine.request_stream import RequestStream
from coterie.runtime.engine.waiting_queue import WaitingQueue
from coterie.runtime.messages import Abort, Acknowledge, StepOutput
from coterie.runtime.request import GenerateRequest

_log = logging.getLogger("coterie.engine")


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    stream: RequestStream
    choices: list[Choice]
    deadline: asyncio.TimerHandle | None = None


class AsyncEngine:
    """A running deployment. Make it with ``start``, end it with ``shutdown``.

    Attributes:
        config: as given.
        tokenizer: None with --skip-tokenizer-init.
        max_model_len: most tokens of prompt plus output.
    """

    def __init__(self, deployment: Deployment) -> None:
        plan, supervisor = deployment.plan, deployment.supervisor
        self.plan = plan
        self.config = plan.config
        self.model_config = plan.model_config
        self.served_model_name = plan.served_model_name
        self.max_model_len = plan.max_model_len
        self.tokenizer = deployment.tokenizer
        self.num_finished = 0
        self.num_aborted = 0
        self._deployment = deployment
        self._supervisor = supervisor
        self._queue = WaitingQueue(plan.config.scheduler.max_waiting)
        num_blocks = {
            seat: loaded.num_blocks
            for seat in plan.layout.attention_seats
            if (loaded := supervisor.seats[seat].loaded) is not None
        }
        self._coordinator = Coordinator(
            num_blocks,
            plan.config.cache.block_size,
            plan.config.scheduler.max_num_seqs,
            plan.config.cache.enable_prefix_caching,
        )
        self._admission = Admission(
            tokenizer=self.tokenizer,
            vocab_size=plan.model_config.vocab_size,
            eos_token_ids=plan.model_config.eos_token_ids,
            max_model_len=plan.max_model_len,
            max_cache_tokens=self._coordinator.max_tokens_per_choice,
            attention_seats=plan.layout.attention_seats,
            seed=plan.config.model.seed,
        )
        self._live: dict[str, _Live] = {}
        self._choices: dict[str, Choice] = {}
        self._dead: str | None = None
        self._draining = False
        self._idle = asyncio.Event()

    @classmethod
    async def start(
        cls, config: EngineConfig, progress: ProgressCallback | None = None
    ) -> "AsyncEngine":
        """Check everything, start ranks, load the model.

        Args:
            progress: called on the event loop with (stage, done, total).

        Raises:
            ConfigError, RuntimeFailure: nothing is left running.

        Blocks: up to ``timeouts.start_s``.
        """
        deployment = await start_deployment(config, progress)
        try:
            engine = cls(deployment)
            deployment.supervisor.serve(engine)
        except BaseException:
            await deployment.stop(0.0)
            raise
        return engine

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Admit a request.

        Returns:
            Its stream of outputs; close it early to abort.

        Raises:
            InvalidRequest: it can never run.
            QueueFull: too many wait.
            EngineDead: the engine is stopped or stopping.
        """
        self._check_open()
        prompt_token_ids = await self._admission.prompt_token_ids(request)
        self._check_open()
        request_id = request.request_id
        if request_id in self._live:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        num_choices = request.sampling_params.n
        self._queue.check_room(num_choices, self._retry_after_s())
        stream = RequestStream(request_id, num_choices, self.abort)
        choices = self._admission.choices(
            request, prompt_token_ids, stream, self._coordinator.hashes
        )
        live = self._live[request_id] = _Live(stream, choices)
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(max(0.0, request.deadline_s), self._expire, request_id)
        for choice in choices:
            self._choices[choice.choice_id] = choice
            self._queue.push(choice)
        self._dispatch()
        return stream

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine is stopped: {self._dead}")
        if self._draining:
            raise EngineDead("the engine is shutting down")

    def _retry_after_s(self) -> float:
        """A guess: as if everything bound had to end before there is room."""
        return min(30.0, 1.0 + len(self._queue) / max(1, self._coordinator.num_bound))

    def _dispatch(self) -> None:
        if not len(self._queue):
            return
        for choice in self._coordinator.bind(self._queue):
            assert choice.seat is not None
            self._supervisor.send(choice.seat, choice.assign())

    def on_step(self, output: StepOutput) -> None:
        """One committed step of one rank: the engine's only frequent event."""
        coordinator, supervisor = self._coordinator, self._supervisor
        coordinator.on_step(output)
        ended: list[str] = []
        dropped: list[str] = []
        for news in output.outputs:
            choice = self._choices.get(news.request_id)
            if choice is None or choice.seat != output.seat:
                if news.finish_reason is not None:
                    ended.append(news.request_id)
                continue
            processed = process(choice, news)
            coordinator.progressed(choice)
            choice.stream.put(processed.output)
            if processed.stopped_early:
                dropped.append(news.request_id)
            elif news.finish_reason is not None:
                ended.append(news.request_id)
            if processed.output.finish_reason is not None:
                self._forget(choice)
        if dropped:
            supervisor.send(output.seat, Abort(dropped))
        if ended:
            supervisor.send(output.seat, Acknowledge(ended))
        self._dispatch()

    def _forget(self, choice: Choice) -> None:
        """A choice is over; with the last one its request is."""
        self._coordinator.release(choice)
        self._queue.remove(choice.choice_id)
        self._choices.pop(choice.choice_id, None)
        live = self._live.get(choice.stream.request_id)
        if live is not None and choice.stream.ended:
            self.num_finished += 1
            self._end(choice.stream.request_id, live)

    def _end(self, request_id: str, live: _Live) -> None:
        del self._live[request_id]
        if live.deadline is not None:
            live.deadline.cancel()
        if not self._live:
            self._idle.set()

    def _drop(self, request_id: str, error: Exception) -> None:
        """Fail a request and take what is left of it from its ranks."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._end(request_id, live)
        self.num_aborted += 1
        live.stream.fail(error)
        by_seat: dict[int, list[str]] = {}
        for choice in live.choices:
            if self._choices.pop(choice.choice_id, None) is None:
                continue
            self._queue.remove(choice.choice_id)
            if choice.seat is not None:
                by_seat.setdefault(choice.seat, []).append(choice.choice_id)
                self._coordinator.release(choice)
        for seat, choice_ids in by_seat.items():
            self._supervisor.send(seat, Abort(choice_ids))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream fails with Cancelled. Unknown or ended ids are ignored."""
        self._drop(request_id, Cancelled(f"request {request_id} was aborted"))
        self._dispatch()

    def _expire(self, request_id: str) -> None:
        self._drop(request_id, DeadlineExceeded(f"request {request_id} passed its deadline"))
        self._dispatch()

    def on_requests_failed(self, seat: int, request_ids: list[str], error: Exception) -> None:
        """A rank could not run these choices; it lives."""
        for choice_id in request_ids:
            choice = self._choices.get(choice_id)
            if choice is not None:
                self._drop(choice.stream.request_id, error)
        self._dispatch()

    def on_rank_lost(self, seat: int, error: RuntimeFailure) -> None:
        """A rank is no member any more: its requests fail, and with lost experts all do."""
        bound = self._coordinator.lose(seat)
        if seat in self.plan.layout.expert_seats or not self._coordinator.ranks:
            if self._dead is None:
                _log.error("without rank %d the engine stops: %d requests", seat, len(self._live))
            self._dead = self._dead or str(error)
            for request_id in list(self._live):
                self._drop(request_id, error)
            return
        _log.error("%d requests were on rank %d and fail", len(bound), seat)
        for choice in bound:
            self._drop(choice.stream.request_id, error)
        self._dispatch()

    async def status(self) -> dict[str, Any]:
        """The ``/status`` document. Blocks: up to 2 s when a rank does not answer."""
        await self._supervisor.query_status()
        return status.document(
            self._supervisor,
            self.plan.layout,
            running=self._coordinator.num_bound,
            waiting=len(self._queue),
            finished=self.num_finished,
            aborted=self.num_aborted,
        )

    def health(self) -> dict[str, Any]:
        """Whether the engine works: {"live", "ready", "ranks": [...]}. Never blocks."""
        ranks = status.rank_health(self._supervisor)
        live = self._dead is None
        return {"live": live, "ready": live and not self._draining, "ranks": ranks}

    def counters(self) -> Mapping[str, float | dict[int, float]]:
        """Numbers for ``/metrics``: by name, those of ranks by seat. Never blocks.

        Rank counters are as of the last ``status`` or ``refresh_counters``.
        """
        own: dict[str, float | dict[int, float]] = {
            "requests_running": float(self._coordinator.num_bound),
            "requests_waiting": float(len(self._queue)),
            "requests_finished_total": float(self.num_finished),
            "requests_aborted_total": float(self.num_aborted),
            "epoch": float(self._supervisor.epoch),
        }
        return own | status.rank_counters(self._supervisor)

    async def refresh_counters(self) -> None:
        """Ask all ranks for fresh counters. Blocks: up to 2 s when a rank does not answer."""
        await self._supervisor.query_status()

    async def shutdown(self, deadline_s: float | None = None) -> None:
        """Let requests end, then ranks; force what is left at the deadline. Safe to call twice.

        Args:
            deadline_s: for all of it; default ``timeouts.shutdown_s``.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + (self.config.timeouts.shutdown_s if deadline_s is None else deadline_s)
        self._draining = True
        teardown_s = max(MIN_TEARDOWN_S, (end - loop.time()) / 3)
        if self._live:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(loop.time(), end - teardown_s)):
                    await self._idle.wait()
        for request_id in list(self._live):
            self._drop(request_id, EngineDead("the engine is shutting down"))
        self._dead = self._dead or "it was shut down"
        await self._deployment.stop(end - loop.time())
