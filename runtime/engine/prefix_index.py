"""Which prefixes an attention rank probably has in its cache, as the engine remembers them.

The coordinator keeps one per rank and inserts what it bound there. Hashes are those of the rank's
own block pool. A guess: a wrong one costs a longer prefill, never a wrong result.
"""

from collections import OrderedDict
from collections.abc import Sequence

from coterie.attention.block_pool import ROOT_HASH, hash_block


def block_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Chained hashes of the full blocks of a sequence."""
    hashes, parent = [], ROOT_HASH
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """Least recently used set of block hashes.

    Args:
        capacity: blocks of the rank's cache; 0 remembers nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are known."""
        for count, key in enumerate(hashes):
            if key not in self._hashes:
                return count
        return len(hashes)

    def insert(self, hashes: Sequence[bytes]) -> None:
        """Remember blocks; the start of a chain counts as used later than its end."""
        for key in reversed(hashes):
            self._hashes[key] = None
            self._hashes.move_to_end(key)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)
