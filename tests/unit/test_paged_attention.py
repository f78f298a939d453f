"""Rotary embedding and paged attention: numba against torch, and rows independent bit for bit."""

from dataclasses import dataclass, replace

import pytest
import torch

from coterie.attention.backend import select_attention
from coterie.attention.kv_cache import KVPair, PagedKVCache
from coterie.attention.metadata import ForwardBatch
from coterie.attention.numba_attention import NumbaAttention
from coterie.attention.torch_attention import TorchAttention
from coterie.errors import ConfigError

DTYPES = [torch.bfloat16, torch.float32]
MAX_LEN = 400


@pytest.fixture(scope="module")
def numba_attention() -> NumbaAttention:
    backend = NumbaAttention()
    backend.warm_up(torch.bfloat16, 64)
    return backend


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def make_batch(seq_lens: list[int], num_new: list[int], block_size: int) -> ForwardBatch:
    """Requests whose last ``num_new`` tokens are computed, on shuffled blocks."""
    num_blocks = [-(-length // block_size) for length in seq_lens]
    free = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1)).int()
    table = torch.zeros(len(seq_lens), max(num_blocks, default=1), dtype=torch.int32)
    positions, slots = [], []
    for i, (length, new) in enumerate(zip(seq_lens, num_new, strict=True)):
        table[i, : num_blocks[i]], free = free[: num_blocks[i]], free[num_blocks[i] :]
        at = torch.arange(length - new, length)
        positions.append(at)
        slots.append(table[i].long()[at // block_size] * block_size + at % block_size)
    return ForwardBatch(
        input_ids=torch.zeros(sum(num_new), dtype=torch.int64),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_start_loc=torch.tensor([0, *num_new]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        big=False,
    )


def random_cache(seq_lens: list[int], block_size: int, heads: Heads, dtype: torch.dtype) -> KVPair:
    num_blocks = sum(-(-length // block_size) for length in seq_lens)
    cache = PagedKVCache(1, num_blocks, block_size, heads.num_kv_heads, heads.head_dim, dtype)
    kv = cache.layer(0)
    for index, tensor in enumerate(kv):
        generator = torch.Generator().manual_seed(index)
        values = torch.randn((*tensor.shape[:3], heads.head_dim), generator=generator)
        tensor[..., : heads.head_dim] = values.to(dtype)
    return kv


def attend(backend: NumbaAttention | TorchAttention, q, kv, batch, first=0, last=None):  # type: ignore[no-untyped-def]
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), -7.0)
    backend.forward(q, kv, batch, 0.3, out, first, q.shape[0] if last is None else last)
    return out


def queries(num_tokens: int, heads: Heads) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn((num_tokens, heads.num_heads, heads.head_dim), generator=generator)


SHAPES = [Heads(4, 1, 8), Heads(9, 3, 64), Heads(2, 2, 24), Heads(5, 1, 80), Heads(8, 2, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_attention_against_torch(
    numba_attention: NumbaAttention, dtype: torch.dtype, heads: Heads, block_size: int
) -> None:
    seq_lens, num_new = [1, 37, 64, 65, 100, 33], [1, 1, 1, 65, 23, 0]
    batch = make_batch(seq_lens, num_new, block_size)
    kv = random_cache(seq_lens, block_size, heads, dtype)
    q = queries(batch.num_tokens, heads)
    actual = attend(numba_attention, q, kv, batch)
    expected = attend(TorchAttention(), q, kv, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [Heads(4, 1, 8), Heads(9, 3, 64), Heads(5, 1, 80)], ids=str)
def test_rows_do_not_depend_on_chunks_or_company(
    numba_attention: NumbaAttention, dtype: torch.dtype, heads: Heads
) -> None:
    """A prompt of 70 rows: whole, in pieces of rows, and row by row as a decode would."""
    batch = make_batch([70], [70], 16)
    kv = random_cache([70], 16, heads, dtype)
    q = queries(70, heads)
    whole = attend(numba_attention, q, kv, batch)
    pieces = torch.empty_like(whole)
    for first, last in ((0, 1), (1, 18), (18, 18), (18, 50), (50, 70)):
        out = attend(numba_attention, q, kv, batch, first, last)
        assert (out[:first] == -7).all()
        assert (out[last:] == -7).all()
        pieces[first:last] = out[first:last]
    assert torch.equal(pieces, whole)
    for row in range(70):
        alone = replace(
            batch,
            positions=batch.positions[row : row + 1],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([row + 1], dtype=torch.int32),
        )
        assert torch.equal(attend(numba_attention, q[row : row + 1], kv, alone)[0], whole[row])


def test_long_context_is_cut_into_smaller_tiles(numba_attention: NumbaAttention) -> None:
    heads = Heads(32, 1, 16)
    batch = make_batch([3000], [20], 16)
    kv = random_cache([3000], 16, heads, torch.bfloat16)
    q = queries(20, heads)
    actual = attend(numba_attention, q, kv, batch)
    expected = attend(TorchAttention(), q, kv, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    decode = make_batch([3000], [1], 16)
    assert torch.equal(attend(numba_attention, q[-1:], kv, decode)[0], actual[-1])


def test_nan_beyond_a_context_is_not_read(numba_attention: NumbaAttention) -> None:
    heads = Heads(2, 1, 16)
    batch = make_batch([21], [5], 16)
    kv = random_cache([21], 16, heads, torch.bfloat16)
    clean = attend(numba_attention, queries(5, heads), kv, batch)
    for tensor in kv:
        tensor[batch.block_table[0, 1].item(), :, 5:] = float("nan")
    assert torch.equal(attend(numba_attention, queries(5, heads), kv, batch), clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache(
    numba_attention: NumbaAttention, dtype: torch.dtype, heads: Heads, normed: bool
) -> None:
    batch = make_batch([9, 30], [9, 4], 8)
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn((batch.num_tokens, heads.row), generator=generator)
    angles = torch.randn((MAX_LEN, heads.head_dim // 2), generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norm = torch.rand(heads.head_dim, generator=generator) + 0.5 if normed else None
    slots = batch.slot_mapping.clone()
    slots[2] = -1

    def run(backend: NumbaAttention | TorchAttention) -> tuple[torch.Tensor, ...]:
        cache = PagedKVCache(1, 6, 8, heads.num_kv_heads, heads.head_dim, dtype)
        q = backend.rope_and_cache(
            qkv,
            batch.positions,
            slots,
            cos_sin,
            cache.layer(0),
            heads.num_heads,
            heads.num_kv_heads,
            norm,
            norm,
            1e-6,
        )
        return q, *(tensor.float() for tensor in cache.layer(0))

    rounding = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for actual, expected in zip(run(numba_attention), run(TorchAttention()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=rounding, atol=1e-5)
    assert (run(numba_attention)[1] != 0).any(dim=-1).sum() == 12 * heads.num_kv_heads


def test_out_of_range_is_refused(numba_attention: NumbaAttention) -> None:
    heads = Heads(2, 1, 16)
    batch = make_batch([20], [4], 16)
    kv = random_cache([20], 16, heads, torch.bfloat16)
    q = queries(4, heads)
    for bad in (
        replace(batch, block_table=torch.full((1, 2), 2, dtype=torch.int32)),
        replace(batch, positions=batch.positions + 16),
    ):
        with pytest.raises(IndexError):
            attend(numba_attention, q, kv, bad)
    qkv, table = torch.zeros(4, heads.row), torch.zeros(20, 16)
    for positions, slots in (
        (batch.positions + 1, batch.slot_mapping),
        (batch.positions, batch.slot_mapping + 32),
    ):
        with pytest.raises(IndexError):
            numba_attention.rope_and_cache(qkv, positions, slots, table, kv, 2, 1, None, None, 1e-6)


def test_select_attention() -> None:
    assert select_attention("auto").name == "numba"
    assert select_attention("torch").name == "torch"
    with pytest.raises(ConfigError):
        select_attention("flash")
