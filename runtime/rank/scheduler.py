"""Which requests run in the next step of one attention rank, and with how many tokens each.

Continuous batching: decodes first, then prefill chunks, oldest request first. Pure Python, no
torch. Called by the step loop: ``schedule`` -> (forward, sample) -> ``commit`` or ``rollback``.
Nothing but block ownership changes before ``commit``, so a rolled back step is simply scheduled
again. Never starves: the oldest running request always gets its blocks, and new requests are
admitted strictly in order.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coterie.attention.block_pool import ROOT_HASH, BlockPool
from coterie.errors import InvalidRequest, RequestError
from coterie.runtime.config import SchedulerConfig
from coterie.runtime.messages import Assign, TokenOutput
from coterie.runtime.rank.cost_model import CostModel
from coterie.runtime.rank.requests import Request, SampledToken, check_finish

BIG_STEP_ROWS = 256
"""A step with more rows than this is big: computed in pieces, and no peer waits for it."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's run of rows in a step."""

    request: Request
    num_computed_tokens: int
    """Position of its first row."""
    num_scheduled_tokens: int
    sampled: bool
    """Whether its last row's logits choose a token (False: more of the prompt is to come)."""
    decode: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step."""

    step: int
    requests: tuple[ScheduledRequest, ...]
    """In the order of their rows."""
    big: bool

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_scheduled_tokens for entry in self.requests)

    @property
    def sampled(self) -> tuple[Request, ...]:
        """Requests that choose a token, in the order of their rows."""
        return tuple(entry.request for entry in self.requests if entry.sampled)


class Scheduler:
    """All requests bound to one attention rank, from Assign to finish or abort."""

    def __init__(
        self,
        block_pool: BlockPool,
        config: SchedulerConfig,
        max_model_len: int,
        cost_model: CostModel,
    ) -> None:
        self.block_pool = block_pool
        self.config = config
        self.cost_model = cost_model
        # A request alone can always hold all it may grow to.
        self.max_total_tokens = min(max_model_len, block_pool.num_blocks * block_pool.block_size)
        self.step = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Prompt tokens spared by the prefix cache so far."""
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._arrivals = 0
        self._in_flight: SchedulerOutput | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Bound requests without blocks: new and preempted ones."""
        return len(self._waiting)

    def add(self, assign: Assign) -> None:
        """Bind a request.

        Raises:
            InvalidRequest: it cannot run here: empty, too long, or bound already.
        """
        total = len(assign.prompt_token_ids) + len(assign.output_token_ids)
        if not assign.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if assign.request_id in self._requests:
            raise InvalidRequest(f"request {assign.request_id} is bound to this rank already")
        if total >= self.max_total_tokens:
            raise InvalidRequest(
                f"{total} tokens leave no room for output: max_model_len and the KV cache of a "
                f"rank allow {self.max_total_tokens} tokens of prompt plus output",
                param="prompt",
            )
        request = Request(
            assign=assign,
            arrival=self._arrivals,
            token_ids=[*assign.prompt_token_ids, *assign.output_token_ids],
        )
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Drop requests; their blocks are free now, or once the step in flight is processed.

        Returns:
            the ids that were bound here.
        """
        dropped = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._drop(request)
                dropped.append(request_id)
        return dropped

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request)
        self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        flying = self._in_flight
        fenced = flying is not None and any(e.request is request for e in flying.requests)
        fence_step = flying.step if flying is not None and fenced else None
        self.block_pool.free(request.blocks, fence_step=fence_step)
        request.blocks = []

    def schedule(self) -> SchedulerOutput | None:
        """Plan a step; None when nothing can run now.

        At most one step is in flight: end it with ``commit`` or ``rollback`` first.
        """
        assert self._in_flight is None, "a step is in flight"
        planned: dict[str, ScheduledRequest] = {}
        preemptions = self.num_preemptions
        rows_left = self.config.max_num_batched_tokens
        for request in self._oldest_first():
            if rows_left == 0:
                break
            if request.num_uncomputed_tokens == 1 and self._is_running(request):
                rows_left -= self._plan_rows(planned, request, 1)
        prefill_left = rows_left
        if planned:
            budget_rows = self.cost_model.prefill_rows(self.config.prefill_budget_ms)
            prefill_left = min(rows_left, budget_rows)
        for request in self._oldest_first():
            if prefill_left == 0:
                break
            if request.num_uncomputed_tokens > 1 and self._is_running(request):
                prefill_left -= self._plan_rows(planned, request, prefill_left)
        while prefill_left > 0 and self.num_preemptions == preemptions and self._admit_next():
            newest = next(reversed(self._running.values()))
            prefill_left -= self._plan_rows(planned, newest, prefill_left)
        if not planned:
            return None
        self.step += 1
        entries = tuple(planned.values())
        num_rows = sum(entry.num_scheduled_tokens for entry in entries)
        self._in_flight = SchedulerOutput(self.step, entries, num_rows > BIG_STEP_ROWS)
        return self._in_flight

    def _oldest_first(self) -> list[Request]:
        return sorted(self._running.values(), key=lambda request: request.arrival)

    def _is_running(self, request: Request) -> bool:
        return request.request_id in self._running

    def _plan_rows(self, planned: dict[str, ScheduledRequest], request: Request, limit: int) -> int:
        """Put at most ``limit`` rows of a running request into the plan; how many it got."""
        wanted = min(limit, request.num_uncomputed_tokens)
        count = self._reserve(planned, request, wanted)
        if count > 0:
            planned[request.request_id] = ScheduledRequest(
                request=request,
                num_computed_tokens=request.num_computed_tokens,
                num_scheduled_tokens=count,
                sampled=count == request.num_uncomputed_tokens,
                decode=count == 1 and request.num_output_tokens > 0,
            )
        return count

    def _reserve(self, planned: dict[str, ScheduledRequest], request: Request, wanted: int) -> int:
        """Blocks for ``wanted`` more rows, preempting the youngest if there is none at all."""
        size = self.block_pool.block_size
        while True:
            room = (len(request.blocks) + self.block_pool.num_free) * size
            count = min(wanted, room - request.num_computed_tokens)
            if count > 0:
                missing = -(-(request.num_computed_tokens + count) // size) - len(request.blocks)
                request.blocks += self.block_pool.allocate(max(missing, 0)) or []
                return count
            victim = max(self._running.values(), key=lambda other: other.arrival)
            if len(self._running) == 1:
                return 0  # Alone: what it lacks is behind a fence and comes back by itself.
            planned.pop(victim.request_id, None)
            self._preempt(victim)
            if victim is request:
                return 0

    def _preempt(self, request: Request) -> None:
        """Take all blocks; it stays bound and is first to be admitted again."""
        del self._running[request.request_id]
        self._free_blocks(request)
        request.num_computed_tokens = 0
        request.block_hashes = []
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit_next(self) -> bool:
        """Move the first waiting request to running if all its known tokens find room.

        All its blocks are taken at once, and a block per running request is left for growth:
        what was admitted is not preempted a few steps later.
        """
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return False
        request = self._waiting[0]
        pool = self.block_pool
        if 1 + len(self._running) > pool.num_free:
            return False  # Spares hashing the prompt in every step of a full rank.
        matched = pool.match_prefix(request.token_ids)
        missing = -(-len(request.token_ids) // pool.block_size) - len(matched)
        if missing + len(self._running) > pool.num_free_after(matched):
            return False
        self._waiting.popleft()
        pool.acquire(matched)
        request.blocks = matched + (pool.allocate(missing) or [])
        request.block_hashes = [pool.block_hash(block) or ROOT_HASH for block in matched]
        request.num_computed_tokens = len(matched) * pool.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.num_cached_tokens += request.num_cached_tokens
        self._running[request.request_id] = request
        return True

    def rollback(self, output: SchedulerOutput) -> None:
        """The step did not happen. Requests keep their blocks and are scheduled again."""
        assert output is self._in_flight, "not the step in flight"
        self._in_flight = None
        self.block_pool.process_step(output.step)

    def commit(
        self,
        output: SchedulerOutput,
        sampled: Sequence[SampledToken | RequestError],
        step_ms: float,
    ) -> list[TokenOutput]:
        """Make the step count: computed tokens, block hashes, new tokens, finishes.

        Args:
            sampled: one result per request of ``output.sampled``; an error drops that request
                without an output.
            step_ms: measured time of the step, for the cost model.
        """
        assert output is self._in_flight, "not the step in flight"
        self._in_flight = None
        num_decodes = sum(entry.decode for entry in output.requests)
        self.cost_model.observe(num_decodes, output.num_tokens - num_decodes, step_ms)
        results = iter(sampled)
        outputs = []
        for entry in output.requests:
            result = next(results) if entry.sampled else None
            request = entry.request
            if self._requests.get(request.request_id) is not request:
                continue  # Aborted while the step ran.
            request.num_computed_tokens += entry.num_scheduled_tokens
            self._commit_blocks(request)
            if isinstance(result, RequestError):
                self._drop(request)
            elif result is not None:
                outputs.append(self._commit_token(request, result))
        self.block_pool.process_step(output.step)
        return outputs

    def _commit_blocks(self, request: Request) -> None:
        size = self.block_pool.block_size
        hashes = request.block_hashes
        if not self.block_pool.enable_prefix_caching:
            return
        while (len(hashes) + 1) * size <= request.num_computed_tokens:
            index = len(hashes)
            parent = hashes[-1] if hashes else ROOT_HASH
            tokens = request.token_ids[index * size : (index + 1) * size]
            hashes.append(self.block_pool.commit_block(request.blocks[index], parent, tokens))

    def _commit_token(self, request: Request, sampled: SampledToken) -> TokenOutput:
        request.token_ids.append(sampled.token_id)
        finish = check_finish(request, self.max_total_tokens)
        if finish is not None:
            self._drop(request)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[sampled.token_id],
            finish_reason=finish.reason if finish else None,
            stop_token_id=finish.stop_token_id if finish else None,
            num_cached_tokens=request.num_cached_tokens or 0,
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
        )
