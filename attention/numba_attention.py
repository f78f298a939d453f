"""``NumbaAttention``: paged attention compiled by numba, decode and prefill by the same arithmetic.

One object per compute thread: it owns the scratch memory.
"""

import torch

from coterie.attention import numba_ops as ops
from coterie.attention.kv_cache import KVPair, padded_head_dim
from coterie.attention.metadata import ForwardBatch
from coterie.experts.kernels.numba_cache import one_compiles
from coterie.experts.kernels.scratch import Scratch, address


class NumbaAttention:
    """See ``AttentionBackend``."""

    name = "numba"

    def __init__(self) -> None:
        self._scratch = Scratch()

    def warm_up(self, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> None:
        """Compile or load everything.

        Blocks: seconds on the first start of a machine, a fraction of one afterwards.
        """
        with one_compiles():
            self._run_everything(dtype, head_dim)

    def _run_everything(self, dtype: torch.dtype, head_dim: int) -> None:
        shape = (1, 1, 16, padded_head_dim(head_dim))
        kv = (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        positions, angles = torch.arange(2), torch.zeros(2, head_dim)
        qkv, norm = torch.ones(2, 3 * head_dim), torch.ones(head_dim)
        q = self.rope_and_cache(qkv, positions, positions, angles, kv, 1, 1, norm, norm, 1e-6)
        batch = ForwardBatch(
            input_ids=positions,
            positions=positions,
            slot_mapping=positions,
            query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
            seq_lens=torch.tensor([2], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            logits_rows=positions,
            big=False,
        )
        self.forward(q, kv, batch, 1.0, torch.empty(2, head_dim), 0, 2)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: KVPair,
        num_heads: int,
        num_kv_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        num_tokens, head_dim = qkv.shape[0], cos_sin.shape[1]
        k, v = kv
        block_size, columns = k.shape[2:]
        assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, (qkv.shape, head_dim)
        assert positions.shape == slot_mapping.shape == (num_tokens,), slot_mapping.shape
        assert k.shape == v.shape, (k.shape, v.shape)
        assert k.shape[1] == num_kv_heads, (k.shape, num_kv_heads)
        assert columns == padded_head_dim(head_dim), (columns, head_dim)
        q = torch.empty(num_tokens, num_heads, head_dim)
        done = ops.rope_and_cache(
            address(qkv, torch.float32),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            address(positions, torch.int64),
            address(slot_mapping, torch.int64),
            address(cos_sin, torch.float32),
            cos_sin.shape[0],
            address(k, v.dtype),
            address(v, k.dtype),
            int(k.dtype is torch.bfloat16),
            k.shape[0],
            block_size,
            columns,
            0 if q_norm is None else address(q_norm, torch.float32),
            0 if k_norm is None else address(k_norm, torch.float32),
            float(eps),
            q.data_ptr(),
            self._scratch.reserve(2 * head_dim * 4),
        )
        if not done:
            raise IndexError("a position or a slot lies outside the rotary table or the KV cache")
        return q

    def forward(
        self,
        q: torch.Tensor,
        kv: KVPair,
        batch: ForwardBatch,
        scale: float,
        out: torch.Tensor,
        first_row: int,
        last_row: int,
    ) -> None:
        num_tokens, num_heads, head_dim = q.shape
        k, v = kv
        num_kv_heads, block_size, columns = k.shape[1:]
        num_reqs, table_width = batch.block_table.shape
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        assert columns == padded_head_dim(head_dim), (columns, head_dim)
        assert out.shape == (num_tokens, num_heads * head_dim), (out.shape, q.shape)
        assert 0 <= first_row <= last_row <= num_tokens, (first_row, last_row, num_tokens)
        group = num_heads // num_kv_heads
        capacity = table_width * block_size
        total = ops.scratch_bytes(num_heads, num_kv_heads, columns, block_size, capacity)
        done = ops.attend(
            address(q, torch.float32),
            num_heads,
            num_kv_heads,
            head_dim,
            columns,
            address(k, v.dtype),
            address(v, k.dtype),
            int(k.dtype is torch.bfloat16),
            k.shape[0],
            block_size,
            address(batch.block_table, torch.int32),
            table_width,
            address(batch.query_start_loc, torch.int32),
            num_reqs,
            address(batch.positions, torch.int64),
            float(scale),
            address(out, torch.float32),
            first_row,
            last_row,
            self._scratch.reserve(total),
            max(ops.SCORE_BYTES, group * (capacity + 16) * 4),
        )
        if not done:
            raise IndexError("a row's context lies outside its block table or the KV cache")
