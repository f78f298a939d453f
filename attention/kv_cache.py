"""``PagedKVCache``: the K and V tensors of all layers of one attention rank.

Owns memory only; which block belongs to whom is the block pool's business. The attention backends
read and write it. Layout of K and of V, per layer:
``[num_blocks, num_kv_heads, block_size, head_dim rounded up to 16]``, the added columns always 0.
"""

import torch

from coterie.errors import ConfigError

KVPair = tuple[torch.Tensor, torch.Tensor]


def padded_head_dim(head_dim: int) -> int:
    """Columns a head occupies in the cache."""
    return (head_dim + 15) // 16 * 16


class PagedKVCache:
    """Zeroed at birth; the system gives memory as blocks are first written.

    Raises:
        ConfigError: a dtype that is not bfloat16 or float32, or a size below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(f"the KV cache holds bfloat16 or float32, got {dtype}")
        if min(num_layers, num_blocks, block_size, num_kv_heads, head_dim) < 1:
            raise ConfigError(
                f"a KV cache of {num_layers} layers, {num_blocks} blocks of {block_size} tokens, "
                f"{num_kv_heads} heads of {head_dim} is empty"
            )
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (num_blocks, num_kv_heads, block_size, padded_head_dim(head_dim))
        self._layers = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
            for _ in range(num_layers)
        ]

    def layer(self, index: int) -> KVPair:
        """K and V of one layer."""
        return self._layers[index]

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one block over all layers, K and V together."""
        columns = num_kv_heads * padded_head_dim(head_dim)
        return num_layers * 2 * block_size * columns * dtype.itemsize
