"""Scheduler as a state machine: requests end, in order, within budgets, and give all back."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coterie.attention.block_pool import BlockPool
from coterie.errors import InvalidRequest
from coterie.runtime.config import SchedulerConfig
from coterie.runtime.messages import Assign, TokenOutput
from coterie.runtime.rank.cost_model import MIN_PREFILL_ROWS, CostModel
from coterie.runtime.rank.requests import SampledToken
from coterie.runtime.rank.scheduler import Scheduler, SchedulerOutput
from coterie.runtime.request import SamplingParams

EOS = 3
STOP = 4


def next_token(prompt: list[int], position: int) -> int:
    """The imaginary model: a token is a function of the request and its position."""
    return (sum(prompt) * 7 + position * 5 + len(prompt)) % 11


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        max_rows=st.integers(1, 24),
        ms_per_row=st.sampled_from([0.1, 1.0, 50.0]),
    )
    def create(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_rows: int, ms_per_row: float
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_rows, prefill_budget_ms=20.0
        )
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, self.config, 40, CostModel(ms_per_row))
        self.bound: dict[str, Assign] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        replayed=st.integers(0, 3),
    )
    def add(self, prompt: list[int], max_tokens: int, min_tokens: int, replayed: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        output = [next_token(prompt, index) for index in range(min(replayed, max_tokens - 1))]
        assign = Assign(
            request_id=name,
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_token_ids=(STOP,),
            ),
            eos_token_ids=[EOS],
        )
        try:
            self.scheduler.add(assign)
        except InvalidRequest:
            assert len(prompt) + len(output) >= self.scheduler.max_total_tokens
            return
        self.bound[name] = assign
        self.tokens[name] = list(output)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.bound:
            name = data.draw(st.sampled_from(sorted(self.bound)))
            assert self.scheduler.abort([name]) == [name]
            del self.bound[name]

    @rule(data=st.data(), rolled_back=st.booleans(), aborts=st.booleans())
    def step(self, data: st.DataObject, rolled_back: bool, aborts: bool) -> None:
        output = self.scheduler.schedule()
        if output is None:
            assert not self.bound
            return
        self.check_plan(output)
        if aborts:
            self.abort(data)
        if rolled_back:
            self.scheduler.rollback(output)
        else:
            self.commit(output)

    def check_plan(self, output: SchedulerOutput) -> None:
        names = [entry.request.request_id for entry in output.requests]
        assert len(set(names)) == len(names)
        assert set(names) <= self.bound.keys()
        assert 0 < output.num_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_seqs
        prefill = 0
        for entry in output.requests:
            request = entry.request
            end = entry.num_computed_tokens + entry.num_scheduled_tokens
            assert entry.num_computed_tokens == request.num_computed_tokens
            assert end <= len(request.token_ids)
            assert entry.sampled == (end == len(request.token_ids))
            assert end <= len(request.blocks) * self.pool.block_size
            if len(request.token_ids) - entry.num_computed_tokens > 1:
                prefill += entry.num_scheduled_tokens
        if prefill and any(
            len(e.request.token_ids) - 1 == e.num_computed_tokens for e in output.requests
        ):
            rows = self.scheduler.cost_model.prefill_rows(self.config.prefill_budget_ms)
            assert prefill <= max(rows, MIN_PREFILL_ROWS)

    def commit(self, output: SchedulerOutput) -> None:
        sampled = [
            SampledToken(next_token(r.assign.prompt_token_ids, r.num_output_tokens))
            for r in output.sampled
        ]
        for done in self.scheduler.commit(output, sampled, step_ms=float(output.num_tokens)):
            self.check_output(done)

    def check_output(self, done: TokenOutput) -> None:
        assign = self.bound[done.request_id]
        tokens = self.tokens[done.request_id]
        prompt = assign.prompt_token_ids
        params = assign.sampling_params
        tokens += done.token_ids
        assert tokens == [next_token(prompt, index) for index in range(len(tokens))]
        long_enough = len(tokens) >= params.min_tokens
        if done.finish_reason == "stop":
            assert long_enough
            assert tokens[-1] in (EOS, STOP)
            assert done.stop_token_id == (STOP if tokens[-1] == STOP else None)
        elif done.finish_reason == "length":
            total = len(prompt) + len(tokens)
            assert len(tokens) == params.max_tokens or total == self.scheduler.max_total_tokens
        else:
            assert not (long_enough and tokens[-1] in (EOS, STOP))
            assert len(tokens) < (params.max_tokens or 0)
        if done.finish_reason is not None:
            del self.bound[done.request_id]

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.bound)
        pool = self.pool
        assert pool.num_free + pool.num_pending + pool.num_used == pool.num_blocks
        if not self.bound:
            assert pool.num_free == pool.num_blocks

    def teardown(self) -> None:
        """Left alone, everything ends: no starvation, no deadlock."""
        if not hasattr(self, "scheduler"):
            return
        limit = 40 * 40 * (len(self.bound) + 1)
        while self.bound:
            output = self.scheduler.schedule()
            assert output is not None
            self.check_plan(output)
            self.commit(output)
            limit -= 1
            assert limit > 0, "requests do not end"
        assert self.pool.num_free == self.pool.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
