"""Binding: room in KV blocks, prefix affinity, balance, no starvation. Numbers only."""

import pytest

from coterie.errors import QueueFull
from coterie.runtime.detokenizer import Detokenizer
from coterie.runtime.engine.choice import Choice
from coterie.runtime.engine.coordinator import OUTPUT_MARGIN_TOKENS, Coordinator
from coterie.runtime.engine.prefix_index import PrefixIndex, block_hashes
from coterie.runtime.engine.request_stream import RequestStream
from coterie.runtime.engine.waiting_queue import MAX_OVERTAKEN, WaitingQueue
from coterie.runtime.messages import StepOutput
from coterie.runtime.request import SamplingParams

BLOCK = 4


async def _no_abort(request_id: str) -> None:
    raise AssertionError("nothing is aborted here")


class Bench:
    """A coordinator and a queue, and choices made for them."""

    def __init__(self, blocks: dict[int, int], max_num_seqs: int = 8, limit: int = 1000) -> None:
        self.coordinator = Coordinator(blocks, BLOCK, max_num_seqs, True)
        self.queue = WaitingQueue(limit)
        self.made = 0

    def push(self, num_prompt: int, max_tokens: int = 4, first_token: int | None = None) -> Choice:
        """A choice whose prompt shares nothing with others unless ``first_token`` says so."""
        self.made += 1
        start = 1000 * self.made if first_token is None else first_token
        prompt = list(range(start, start + num_prompt))
        params = SamplingParams(max_tokens=max_tokens)
        choice = Choice(
            choice_id=f"r{self.made}",
            index=0,
            prompt_token_ids=prompt,
            params=params,
            eos_token_ids=[],
            detokenizer=Detokenizer(None, prompt, params),
            stream=RequestStream(f"r{self.made}", 1, _no_abort),
            block_hashes=self.coordinator.hashes(prompt),
        )
        self.queue.push(choice)
        return choice

    def bind(self) -> list[tuple[str, int | None]]:
        return [(c.choice_id, c.seat) for c in self.coordinator.bind(self.queue)]

    def report(self, seat: int, free: int) -> None:
        self.coordinator.on_step(
            StepOutput(
                seat=seat,
                epoch=1,
                step=1,
                outputs=[],
                num_running=0,
                num_preempted=0,
                kv_blocks_free=free,
                step_s=0.0,
            )
        )


def test_equal_ranks_fill_from_the_lowest_seat_and_balance() -> None:
    bench = Bench({0: 100, 1: 100})
    for _ in range(4):
        bench.push(8)
    assert bench.bind() == [("r1", 0), ("r2", 1), ("r3", 0), ("r4", 1)]


def test_a_rank_is_never_promised_twice() -> None:
    """5 blocks: prompt 8 + 4 output = 3 blocks each, so one fits; the second waits."""
    bench = Bench({0: 5})
    first, second = bench.push(8), bench.push(8)
    assert bench.bind() == [("r1", 0)]
    bench.report(0, 5)  # a step older than the assignment must not free its room
    assert bench.bind() == []
    bench.report(0, 3)
    first.output_token_ids.append(7)
    bench.coordinator.progressed(first)
    assert bench.bind() == []
    bench.coordinator.release(first)
    assert bench.bind() == [("r2", 0)]
    assert second.seat == 0


def test_room_is_kept_for_a_margin_of_output_only() -> None:
    blocks = (8 + OUTPUT_MARGIN_TOKENS) // BLOCK
    bench = Bench({0: 2 * blocks})
    bench.push(8, max_tokens=100_000)
    bench.push(8, max_tokens=100_000)
    bench.push(8, max_tokens=100_000)
    assert len(bench.bind()) == 2


def test_at_most_max_num_seqs_are_bound() -> None:
    bench = Bench({0: 100}, max_num_seqs=2)
    for _ in range(3):
        bench.push(4)
    assert len(bench.bind()) == 2


def test_prefix_match_decides_between_equal_ranks() -> None:
    bench = Bench({0: 100, 1: 100})
    other, shared = bench.push(16), bench.push(16, first_token=50)
    bench.bind()
    for choice in (other, shared):
        choice.output_token_ids.append(1)
        bench.coordinator.progressed(choice)
        bench.coordinator.release(choice)
    assert shared.seat == 1
    follower = bench.push(20, first_token=50)
    bench.bind()
    assert follower.seat == 1


def test_a_shared_prefix_does_not_pile_everything_on_one_rank() -> None:
    bench = Bench({0: 1000, 1: 1000}, max_num_seqs=64)
    choices = [bench.push(16, first_token=50) for _ in range(20)]
    bench.bind()
    on_first = sum(choice.seat == 0 for choice in choices)
    assert 8 <= on_first <= 12


def test_a_long_prompt_counts_as_load() -> None:
    bench = Bench({0: 1000, 1: 1000})
    bench.push(800)
    for _ in range(3):
        bench.push(4)
    assert bench.bind() == [("r1", 0), ("r2", 1), ("r3", 1), ("r4", 1)]


def test_small_ones_overtake_a_blocked_head_but_never_starve_it() -> None:
    """The head needs all 10 blocks; one small choice is always running."""
    bench = Bench({0: 10}, max_num_seqs=2)
    running = bench.push(4)
    bench.bind()
    head = bench.push(36)
    overtakers = 0
    for _ in range(3 * MAX_OVERTAKEN):
        small = bench.push(4)
        bound = dict(bench.bind())
        if head.choice_id in bound:
            break
        bench.coordinator.release(running)
        if small.choice_id in bound:
            overtakers += 1
            running = small
        bench.report(0, 8)
    assert head.seat == 0
    assert overtakers == MAX_OVERTAKEN


def test_full_queue_refuses_with_a_time() -> None:
    bench = Bench({0: 10}, limit=2)
    bench.push(4)
    with pytest.raises(QueueFull) as info:
        bench.queue.check_room(2, retry_after_s=3.0)
    assert info.value.retry_after_s == 3.0
    bench.queue.check_room(1, retry_after_s=3.0)


def test_a_lost_rank_gives_back_what_was_bound() -> None:
    bench = Bench({0: 100, 1: 100})
    first, second = bench.push(8), bench.push(8)
    bench.bind()
    assert bench.coordinator.lose(1) == [second]
    assert bench.coordinator.lose(1) == []
    bench.coordinator.release(second)
    bench.push(8)
    assert bench.bind() == [("r3", 0)]
    assert first.seat == 0


def test_prefix_index_forgets_the_ends_of_old_chains_first() -> None:
    index = PrefixIndex(3)
    old, new = block_hashes(range(8), BLOCK), block_hashes(range(100, 108), BLOCK)
    index.insert(old)
    index.insert(new)
    assert index.match(new) == 2
    assert index.match(old) == 1
    assert PrefixIndex(0).match(old) == 0
