"""Shapes, sizes and refusals of the paged KV cache."""

import pytest
import torch

from coterie.attention.kv_cache import PagedKVCache
from coterie.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "columns"), [(64, 64), (8, 16), (80, 80), (24, 32)])
def test_layout_and_bytes(dtype: torch.dtype, head_dim: int, columns: int) -> None:
    cache = PagedKVCache(2, 5, 16, 3, head_dim, dtype)
    total = 0
    for index in range(2):
        for tensor in cache.layer(index):
            assert tensor.shape == (5, 3, 16, columns)
            assert tensor.dtype is dtype
            assert not tensor.any()
            total += tensor.nbytes
    assert total == 5 * PagedKVCache.bytes_per_block(2, 16, 3, head_dim, dtype)


def test_layers_do_not_share_memory() -> None:
    cache = PagedKVCache(2, 1, 4, 1, 16, torch.float32)
    cache.layer(0)[0].fill_(1.0)
    assert not cache.layer(0)[1].any()
    assert not cache.layer(1)[0].any()


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="float16"):
        PagedKVCache(1, 1, 16, 1, 16, torch.float16)
    with pytest.raises(ConfigError, match="0 blocks"):
        PagedKVCache(1, 0, 16, 1, 16, torch.float32)
