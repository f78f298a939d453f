"""Who owns which KV block: reference counts, prefix cache, eviction, fences. Integers only.

Owned and called by the scheduler of one attention rank; knows nothing of requests or tensors.
Every block is in exactly one of three states: used (one or more references), pending (freed, but
a step that may still write to it is in flight) or free. Free and pending blocks keep their hash,
so their content can be found again until the block is handed out for something else.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

HASH_BYTES = 16
ROOT_HASH = b"\0" * HASH_BYTES


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block: its tokens and, through ``parent``, everything before them."""
    return hashlib.blake2b(
        array("q", token_ids).tobytes(), digest_size=HASH_BYTES, key=parent
    ).digest()


class BlockPool:
    """The blocks of one attention rank."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # Next victim first: blocks without a hash, then cached ones, least recently used first.
        self._blank: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._pending: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, evictable ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_pending(self) -> int:
        """Freed blocks that become free once their fence step is processed."""
        return len(self._pending)

    @property
    def num_incoming(self) -> int:
        """Room to count on: free and pending blocks."""
        return self.num_free + self.num_pending

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_incoming

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def block_hash(self, block: int) -> bytes | None:
        """Hash under which the block can be found, or None."""
        return self._hashes[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with one reference each, or nothing and return None."""
        if count > self.num_free:
            return None
        return [self._take_victim() for _ in range(count)]

    def _take_victim(self) -> int:
        if self._blank:
            block, _ = self._blank.popitem(last=False)
        else:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block] = None

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to cached blocks found by ``match_prefix``."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert self._hashes[block] is not None, f"block {block} has no known content"
                if self._pending.pop(block, None) is None:
                    del self._evictable[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int], *, fence_step: int | None = None) -> None:
        """Drop one reference of each block.

        Args:
            blocks: in order of position; the last becomes the first to be evicted.
            fence_step: a step in flight that may write to them; they are reusable only after
                ``process_step`` of this step. None: at once.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if fence_step is None:
                self._make_free(block)
            else:
                self._pending[block] = fence_step

    def _make_free(self, block: int) -> None:
        target = self._blank if self._hashes[block] is None else self._evictable
        target[block] = None

    def process_step(self, step: int) -> None:
        """Steps up to ``step`` touch no block any more: release what waited for them."""
        for block in [b for b, fence in self._pending.items() if fence <= step]:
            del self._pending[block]
            self._make_free(block)

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the longest cached prefix, full blocks only; no references are taken.

        The last token is never matched: at least one token has to be computed for its logits.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        parent = ROOT_HASH
        size = self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            parent = hash_block(parent, token_ids[start : start + size])
            block = self._cached.get(parent)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_after(self, matched: Sequence[int]) -> int:
        """Blocks that can still be allocated once ``matched`` has been acquired."""
        return self.num_free - sum(block in self._evictable for block in matched)

    def commit_block(self, block: int, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Make a full block whose KV is computed findable; call at commit only.

        If an equal block is cached already, this one stays private.

        Returns:
            its hash, the ``parent`` of the next block.
        """
        block_hash = hash_block(parent, token_ids)
        if (
            self.enable_prefix_caching
            and self._hashes[block] is None
            and block_hash not in self._cached
        ):
            self._cached[block_hash] = block
            self._hashes[block] = block_hash
        return block_hash
