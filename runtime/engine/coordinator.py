"""Binds waiting choices to attention ranks: late, by KV room, then prefix, then load.

Pure bookkeeping on numbers that ranks report and choices that were bound; no I/O, no clock. A
choice is bound when a rank has room for its prompt and a margin of output beyond everything bound
there that has not taken its blocks yet, so a rank is never promised twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.runtime.engine.choice import Choice
from coterie.runtime.engine.prefix_index import PrefixIndex, block_hashes
from coterie.runtime.engine.waiting_queue import WaitingQueue
from coterie.runtime.messages import StepOutput

OUTPUT_MARGIN_TOKENS = 256
"""Room kept for a choice's output at binding; beyond it a rank may have to preempt."""
SEQUENCE_COST_TOKENS = 64
"""What one more running sequence costs a rank, in prefill tokens: decides when a prefix match
is not worth a longer line."""


@dataclass
class RankLoad:
    """What the coordinator knows of one attention rank."""

    seat: int
    num_blocks: int
    """KV blocks in all."""
    blocks_free: int
    """As last reported."""
    prefixes: PrefixIndex
    bound: dict[str, Choice] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)
    """Blocks each bound choice is sure to take beyond those it has."""
    promised_blocks: int = 0
    prefill_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens of bound choices without output yet."""
    queued_prefill: int = 0

    @property
    def room_blocks(self) -> int:
        if not self.bound:  # the last report may be older than the end of the last request
            return self.num_blocks
        return self.blocks_free - self.promised_blocks

    @property
    def cost(self) -> int:
        return self.queued_prefill + SEQUENCE_COST_TOKENS * len(self.bound)


class Coordinator:
    """Decides which choice goes where.

    Args:
        num_blocks: KV blocks by attention seat.
        max_num_seqs: most choices bound to one rank.
    """

    def __init__(
        self, num_blocks: dict[int, int], block_size: int, max_num_seqs: int, prefix_caching: bool
    ) -> None:
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._prefix_caching = prefix_caching
        self.ranks = {
            seat: RankLoad(seat, count, count, PrefixIndex(count if prefix_caching else 0))
            for seat, count in sorted(num_blocks.items())
        }

    @property
    def max_tokens_per_choice(self) -> int:
        """Tokens of prompt plus output that an empty rank can hold."""
        return min(rank.num_blocks for rank in self.ranks.values()) * self._block_size

    @property
    def num_bound(self) -> int:
        return sum(len(rank.bound) for rank in self.ranks.values())

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        return block_hashes(token_ids, self._block_size) if self._prefix_caching else []

    def bind(self, queue: WaitingQueue) -> list[Choice]:
        """Take from the queue all that has room now; their ``seat`` says where."""
        taken: list[Choice] = []
        blocked: list[Choice] = []
        for choice in queue.candidates():
            if not any(self._has_slot(rank) for rank in self.ranks.values()):
                break
            rank = self._choose(choice)
            if rank is None:
                blocked.append(choice)
                continue
            queue.remove(choice.choice_id)
            queue.overtaken(blocked)
            self._bind(choice, rank)
            taken.append(choice)
        return taken

    def _has_slot(self, rank: RankLoad) -> bool:
        return len(rank.bound) < self._max_num_seqs

    def _choose(self, choice: Choice) -> RankLoad | None:
        """The rank with room where the choice costs least: its uncached prompt plus what the
        rank has to do already; ties go to the lowest seat."""
        need = self._blocks(self._margin_tokens(choice))
        best, best_cost = None, 0
        for rank in self.ranks.values():
            if not self._has_slot(rank) or need > rank.room_blocks:
                continue
            if choice.wanted_seat in self.ranks and rank.seat != choice.wanted_seat:
                continue
            cached = rank.prefixes.match(choice.block_hashes) * self._block_size
            cost = rank.cost + choice.num_tokens - cached
            if best is None or cost < best_cost:
                best, best_cost = rank, cost
        return best

    def _margin_tokens(self, choice: Choice) -> int:
        """Tokens a choice is given room for."""
        limit = choice.params.max_tokens or OUTPUT_MARGIN_TOKENS
        total = len(choice.prompt_token_ids) + limit
        return min(total, choice.num_tokens + OUTPUT_MARGIN_TOKENS)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _bind(self, choice: Choice, rank: RankLoad) -> None:
        if not rank.bound:
            rank.blocks_free = rank.num_blocks
        cached = rank.prefixes.match(choice.block_hashes) * self._block_size
        rank.prefixes.insert(choice.block_hashes)
        choice.seat = rank.seat
        rank.bound[choice.choice_id] = choice
        self._promise(rank, choice.choice_id, self._blocks(self._margin_tokens(choice)))
        rank.prefill_tokens[choice.choice_id] = choice.num_tokens - cached
        rank.queued_prefill += choice.num_tokens - cached

    def _promise(self, rank: RankLoad, choice_id: str, blocks: int) -> None:
        rank.promised_blocks += blocks - rank.promised.get(choice_id, 0)
        rank.promised[choice_id] = blocks

    def on_step(self, output: StepOutput) -> None:
        """Take over a rank's report; call it before ``progressed`` and ``release``."""
        rank = self.ranks.get(output.seat)
        if rank is not None:
            rank.blocks_free = output.kv_blocks_free

    def progressed(self, choice: Choice) -> None:
        """A bound choice got a token: its prompt is computed, its blocks are in the report."""
        rank = self.ranks.get(choice.seat if choice.seat is not None else -1)
        if rank is None:
            return
        rank.queued_prefill -= rank.prefill_tokens.pop(choice.choice_id, 0)
        # The newest token takes its slot in the next step only.
        computed = self._blocks(choice.num_tokens - 1)
        ahead = self._blocks(self._margin_tokens(choice)) - computed
        self._promise(rank, choice.choice_id, ahead)

    def release(self, choice: Choice) -> None:
        """A bound choice ended or was aborted; its prefix may stay in the rank's cache."""
        rank = self.ranks.get(choice.seat if choice.seat is not None else -1)
        if rank is None or rank.bound.pop(choice.choice_id, None) is None:
            return
        rank.promised_blocks -= rank.promised.pop(choice.choice_id)
        rank.queued_prefill -= rank.prefill_tokens.pop(choice.choice_id, 0)
        if self._prefix_caching and choice.output_token_ids:
            rank.prefixes.insert(
                self.hashes([*choice.prompt_token_ids, *choice.output_token_ids[:-1]])
            )

    def lose(self, seat: int) -> list[Choice]:
        """A rank is gone; returns what was bound there."""
        rank = self.ranks.pop(seat, None)
        return list(rank.bound.values()) if rank is not None else []
