"""BlockPool as a state machine against a plain model of who owns what."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coterie.attention.block_pool import ROOT_HASH, BlockPool

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 4]))
    def create(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.step = 1
        self.owners: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """Committed prefix that each block ends, until the block is handed out again."""

    @rule(token_ids=TOKENS)
    def admit(self, token_ids: list[int]) -> None:
        pool = self.pool
        matched = pool.match_prefix(token_ids)
        size = pool.block_size
        assert len(matched) * size < len(token_ids)
        for index, block in enumerate(matched):
            assert self.content[block] == tuple(token_ids[: (index + 1) * size])
        missing = -(-len(token_ids) // size) - len(matched)
        fits = missing <= pool.num_free_after(matched)
        if not fits:
            return
        pool.acquire(matched)
        fresh = pool.allocate(missing)
        assert fresh is not None
        for block in fresh:
            assert all(block not in blocks for blocks, _ in self.owners)
            self.content.pop(block, None)
        self.owners.append((matched + fresh, token_ids))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        blocks, token_ids = data.draw(st.sampled_from(self.owners))
        size = self.pool.block_size
        parent = ROOT_HASH
        for index in range(data.draw(st.integers(0, len(token_ids) // size))):
            piece = token_ids[index * size : (index + 1) * size]
            parent = self.pool.commit_block(blocks[index], parent, piece)
            self.content[blocks[index]] = tuple(token_ids[: (index + 1) * size])

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), fenced=st.booleans())
    def free(self, data: st.DataObject, fenced: bool) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        blocks, _ = self.owners.pop(index)
        self.pool.free(blocks, fence_step=self.step if fenced else None)

    @rule()
    def end_step(self) -> None:
        self.pool.process_step(self.step)
        assert self.pool.num_pending == 0
        self.step += 1

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        held = [block for blocks, _ in self.owners for block in blocks]
        for block in range(pool.num_blocks):
            assert pool.ref_count(block) == held.count(block)
        assert pool.num_used == len(set(held))
        assert pool.num_free + pool.num_pending + pool.num_used == pool.num_blocks

    @invariant()
    def only_committed_blocks_are_cached(self) -> None:
        if not hasattr(self, "pool"):
            return
        hashes = [self.pool.block_hash(block) for block in range(self.pool.num_blocks)]
        known = [value for value in hashes if value is not None]
        assert len(set(known)) == len(known)
        for block, value in enumerate(hashes):
            assert value is None or block in self.content


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
