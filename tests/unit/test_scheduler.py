"""Scheduler by hand: order, budgets, preemption, finish rules, purity."""

import pytest

from coterie.attention.block_pool import BlockPool
from coterie.errors import InvalidRequest
from coterie.runtime.config import SchedulerConfig
from coterie.runtime.messages import Assign, TokenOutput
from coterie.runtime.rank.cost_model import MIN_PREFILL_ROWS, CostModel
from coterie.runtime.rank.requests import SampledToken
from coterie.runtime.rank.scheduler import BIG_STEP_ROWS, Scheduler, SchedulerOutput
from coterie.runtime.request import SamplingParams

EOS = 99


def make_scheduler(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    max_model_len: int = 4096,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    prefill_budget_ms: float = 400.0,
    ms_per_row: float = 1.0,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size),
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_budget_ms=prefill_budget_ms,
        ),
        max_model_len,
        CostModel(ms_per_row),
    )


def make_assign(
    request_id: str,
    prompt: list[int] | int = 3,
    output: list[int] | None = None,
    **params: object,
) -> Assign:
    base = sum(ord(c) for c in request_id) * 1000
    return Assign(
        request_id=request_id,
        prompt_token_ids=prompt if isinstance(prompt, list) else [base + i for i in range(prompt)],
        output_token_ids=output or [],
        sampling_params=SamplingParams(**{"max_tokens": 4, **params}),  # type: ignore[arg-type]
        eos_token_ids=[EOS],
    )


def rows(output: SchedulerOutput | None) -> dict[str, int]:
    assert output is not None
    return {e.request.request_id: e.num_scheduled_tokens for e in output.requests}


def run_step(scheduler: Scheduler, token: int = 5) -> list[TokenOutput]:
    output = scheduler.schedule()
    assert output is not None
    return scheduler.commit(output, [SampledToken(token) for _ in output.sampled], 1.0)


def test_prefill_then_decode_until_length() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a", 6))
    output = scheduler.schedule()
    assert rows(output) == {"a": 6}
    assert output is not None
    scheduler.rollback(output)
    outputs = [run_step(scheduler, token)[0] for token in (1, 2, 3, 4)]
    assert [o.token_ids for o in outputs] == [[1], [2], [3], [4]]
    assert [o.finish_reason for o in outputs] == [None, None, None, "length"]
    assert not scheduler.has_work
    assert scheduler.block_pool.num_used == 0
    assert scheduler.schedule() is None


def test_long_prompts_are_cut_and_sampled_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_assign("a", 25))
    sampled = []
    for _ in range(3):
        output = scheduler.schedule()
        assert output is not None
        sampled.append((output.num_tokens, len(output.sampled)))
        scheduler.commit(output, [SampledToken(1) for _ in output.sampled], 1.0)
    assert sampled == [(10, 0), (10, 0), (5, 1)]


def test_decodes_come_first_and_prefill_gets_its_budget() -> None:
    scheduler = make_scheduler(prefill_budget_ms=20.0)
    scheduler.add(make_assign("a", 3, max_tokens=20))
    run_step(scheduler)
    scheduler.cost_model.ms_per_prefill_row = 1.0
    scheduler.add(make_assign("b", 50))
    assert rows(scheduler.schedule()) == {"a": 1, "b": 20}


def test_prefill_moves_even_when_it_is_predicted_to_be_slow() -> None:
    scheduler = make_scheduler(prefill_budget_ms=1.0, ms_per_row=1000.0)
    scheduler.add(make_assign("a", 3, max_tokens=20))
    run_step(scheduler)
    scheduler.add(make_assign("b", 50))
    assert rows(scheduler.schedule())["b"] == MIN_PREFILL_ROWS


def test_prefill_alone_is_not_budgeted() -> None:
    scheduler = make_scheduler(prefill_budget_ms=1.0, ms_per_row=1000.0)
    scheduler.add(make_assign("a", 50))
    assert rows(scheduler.schedule()) == {"a": 50}


def test_big_is_a_matter_of_rows() -> None:
    scheduler = make_scheduler(1024, max_num_batched_tokens=2 * BIG_STEP_ROWS)
    scheduler.add(make_assign("a", BIG_STEP_ROWS))
    output = scheduler.schedule()
    assert output is not None
    assert not output.big
    scheduler.rollback(output)
    scheduler.add(make_assign("b", 1))
    output = scheduler.schedule()
    assert output is not None
    assert output.big


def test_max_num_seqs_limits_running() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_assign(name, 3, max_tokens=2))
    assert rows(scheduler.schedule()) == {"a": 3, "b": 3}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_youngest_is_preempted_and_resumes_first() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    scheduler.add(make_assign("a", 3, max_tokens=6))
    scheduler.add(make_assign("b", 3, max_tokens=3))
    scheduler.add(make_assign("c", 1, max_tokens=1))
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    token = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        results = []
        for _ in output.sampled:
            results.append(SampledToken(token))
            token += 1
        for done in scheduler.commit(output, results, 1.0):
            seen[done.request_id] += done.token_ids
        used = scheduler.block_pool.num_used
        assert used <= 5
    assert scheduler.num_preemptions > 0
    assert [len(seen[name]) for name in "abc"] == [6, 3, 1]
    assert seen["c"][0] > seen["b"][0]
    assert scheduler.block_pool.num_free == 5


def test_request_that_fills_the_cache_ends_with_length() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    scheduler.add(make_assign("a", 3, max_tokens=100))
    reasons = []
    while scheduler.has_work:
        reasons.append(run_step(scheduler)[0].finish_reason)
    assert reasons == [None] * 4 + ["length"]


def test_max_model_len_ends_with_length() -> None:
    scheduler = make_scheduler(max_model_len=5)
    scheduler.add(make_assign("a", 3, max_tokens=100))
    assert run_step(scheduler)[0].finish_reason is None
    assert run_step(scheduler)[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [[], list(range(5)), list(range(50))])
def test_impossible_prompts_are_refused(prompt: list[int]) -> None:
    scheduler = make_scheduler(max_model_len=5)
    with pytest.raises(InvalidRequest):
        scheduler.add(make_assign("a", prompt))
    assert not scheduler.has_work


def test_same_id_twice_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a"))
    with pytest.raises(InvalidRequest, match="already"):
        scheduler.add(make_assign("a"))


def test_eos_ends_and_is_part_of_the_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a"))
    (output,) = run_step(scheduler, EOS)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([EOS], "stop", None)


def test_ignore_eos_and_stop_token_ids() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a", ignore_eos=True, stop_token_ids=(7,)))
    assert run_step(scheduler, EOS)[0].finish_reason is None
    (output,) = run_step(scheduler, 7)
    assert (output.finish_reason, output.stop_token_id) == ("stop", 7)


def test_min_tokens_holds_ends_back() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a", min_tokens=2, max_tokens=9, stop_token_ids=(7,)))
    assert run_step(scheduler, EOS)[0].finish_reason is None
    assert run_step(scheduler, 7)[0].finish_reason == "stop"


def test_prefix_hit_after_commit_only() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    prompt = list(range(9))
    scheduler.add(make_assign("a", prompt, max_tokens=1))
    scheduler.add(make_assign("b", prompt, max_tokens=1))
    assert run_step(scheduler)[0].num_cached_tokens == 0
    output = scheduler.schedule()
    assert rows(output) == {"b": 1}
    (done,) = scheduler.commit(output, [SampledToken(5)], 1.0)  # type: ignore[arg-type]
    assert done.num_cached_tokens == 8


def test_replayed_tokens_are_computed_but_not_sent_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a", [1, 2, 3], [4, 5], max_tokens=3))
    output = scheduler.schedule()
    assert rows(output) == {"a": 5}
    (done,) = scheduler.commit(output, [SampledToken(6)], 1.0)  # type: ignore[arg-type]
    assert (done.token_ids, done.finish_reason) == ([6], "length")


def test_rolled_back_step_leaves_no_trace() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a", 9))
    output = scheduler.schedule()
    assert output is not None
    plan = [(e.num_computed_tokens, e.num_scheduled_tokens) for e in output.requests]
    scheduler.rollback(output)
    assert scheduler.block_pool.match_prefix(output.requests[0].request.token_ids) == []
    again = scheduler.schedule()
    assert again is not None
    assert [(e.num_computed_tokens, e.num_scheduled_tokens) for e in again.requests] == plan
    assert again.step > output.step


def test_abort_in_flight_frees_blocks_when_the_step_ends() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a", 9))
    scheduler.add(make_assign("b", 9))
    output = scheduler.schedule()
    assert output is not None
    assert scheduler.abort(["a", "nobody"]) == ["a"]
    assert scheduler.block_pool.num_pending == 3
    done = scheduler.commit(output, [SampledToken(1), SampledToken(2)], 1.0)
    assert [o.request_id for o in done] == ["b"]
    assert scheduler.block_pool.num_pending == 0
    assert scheduler.abort(["b"]) == ["b"]
    assert scheduler.block_pool.num_free == scheduler.block_pool.num_blocks


def test_error_of_one_row_drops_that_request_only() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_assign("a"))
    scheduler.add(make_assign("b"))
    output = scheduler.schedule()
    assert output is not None
    done = scheduler.commit(output, [InvalidRequest("bad"), SampledToken(1)], 1.0)
    assert [o.request_id for o in done] == ["b"]
    assert rows(scheduler.schedule()) == {"b": 1}


def test_cost_model_learns_rows_and_steps() -> None:
    model = CostModel(1.0)
    for _ in range(100):
        model.observe(4, 0, 50.0)
    assert model.decode_step_ms == pytest.approx(50.0)
    for _ in range(200):
        model.observe(4, 100, 50.0 + 100 * 0.25)
    assert model.ms_per_prefill_row == pytest.approx(0.25, rel=0.01)
    assert model.prefill_rows(100.0) == pytest.approx(400, rel=0.01)
