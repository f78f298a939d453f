"""The step of an attention rank in one screen: schedule, forward, sample, commit, report.

Called by the rank's main loop between engine messages, so aborts and membership changes enter only
between steps. A step is a transaction: whatever stops it before its commit leaves no trace, and
the same requests are scheduled again.
"""

import time
from collections.abc import Callable

from coterie.errors import InvalidRequest, RequestError
from coterie.router.token_router import TokenRouter
from coterie.runtime.messages import (
    Abort,
    Acknowledge,
    Assign,
    Failed,
    Message,
    StepOutput,
    TokenOutput,
)
from coterie.runtime.rank.model_runner import ModelRunner, StepHandle
from coterie.runtime.rank.records import Records
from coterie.runtime.rank.scheduler import Scheduler


class StepLoop:
    """Requests and steps of one attention rank. One thread only."""

    def __init__(
        self,
        *,
        seat: int,
        scheduler: Scheduler,
        runner: ModelRunner,
        router: TokenRouter,
        send: Callable[[Message], None],
    ) -> None:
        self.seat = seat
        self.scheduler = scheduler
        self.runner = runner
        self.router = router
        self.records = Records()
        self.last_commit_s: float | None = None
        """time.monotonic() of the last commit."""
        self._send = send
        self._counts = dict.fromkeys(("prefill_tokens", "decode_tokens", "output_tokens"), 0)
        self._forward_s = 0.0
        self._sample_s = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> bool:
        """Run one step; False if there was nothing to run.

        Raises:
            RankDied, EpochChanged: the step did not happen, its requests stay bound.

        Blocks: for a step, serving other ranks meanwhile.
        """
        self.router.align()
        output = self.scheduler.schedule()
        if output is None:
            return False
        start = time.perf_counter()
        self.router.begin_step(output.step, big=output.big)
        try:
            handle = self.runner.submit(output, self.router.poll)
            sampled = self.runner.collect(handle)
        except BaseException:
            self.router.abort_step()
            self.scheduler.rollback(output)
            raise
        step_s = time.perf_counter() - start
        outputs = self.scheduler.commit(output, sampled, step_s * 1000)
        self.router.end_step(more_work=self.scheduler.has_work)
        self._count(handle, outputs)
        for request, result in zip(output.sampled, sampled, strict=True):
            if isinstance(result, RequestError):
                self._fail_request(request.request_id, result)
        self._report(output.step, outputs, step_s)
        return True

    def _report(self, step: int, outputs: list[TokenOutput], step_s: float) -> None:
        for output in outputs:
            self.records.append(output)
        self._send(
            StepOutput(
                seat=self.seat,
                epoch=self.router.epoch,
                step=step,
                outputs=outputs,
                num_running=self.scheduler.num_running,
                num_preempted=self.scheduler.num_waiting,
                kv_blocks_free=self.scheduler.block_pool.num_incoming,
                step_s=step_s,
            )
        )

    def _count(self, handle: StepHandle, outputs: list[TokenOutput]) -> None:
        self.last_commit_s = time.monotonic()
        self._forward_s += handle.forward_s
        self._sample_s += handle.sample_s
        counts = self._counts
        num_decodes = sum(entry.decode for entry in handle.output.requests)
        counts["decode_tokens"] += num_decodes
        counts["prefill_tokens"] += handle.output.num_tokens - num_decodes
        counts["output_tokens"] += len(outputs)

    def assign(self, message: Assign) -> None:
        """Bind a request, or tell the engine why it cannot run."""
        vocab_size = self.runner.vocab_size
        token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        try:
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise InvalidRequest(
                    f"token ids must be between 0 and {vocab_size - 1}", param="prompt"
                )
            self.scheduler.add(message)
        except InvalidRequest as error:
            self._fail_request(message.request_id, error)
            return
        self.records.add(message)

    def abort(self, message: Abort) -> None:
        """Drop requests and tell the engine what room that made."""
        dropped = self.scheduler.abort(message.request_ids)
        self.records.forget(message.request_ids)
        if dropped:
            self._report(self.scheduler.step, [], 0.0)

    def acknowledge(self, message: Acknowledge) -> None:
        self.records.forget(message.request_ids)

    def _fail_request(self, request_id: str, error: RequestError) -> None:
        self.records.forget([request_id])
        self._send(
            Failed(
                seat=self.seat,
                epoch=self.router.epoch,
                step=self.scheduler.step,
                kind=type(error).__name__,
                detail=str(error),
                request_ids=[request_id],
            )
        )

    def counters(self) -> dict[str, float]:
        """Cumulative; names ending in ``_s`` are seconds."""
        return {
            **{f"scheduler_{name}": float(count) for name, count in self._counts.items()},
            "scheduler_cached_tokens": float(self.scheduler.num_cached_tokens),
            "scheduler_preemptions": float(self.scheduler.num_preemptions),
            "kv_evictions": float(self.scheduler.block_pool.num_evictions),
            "forward_s": self._forward_s,
            "sample_s": self._sample_s,
        }
