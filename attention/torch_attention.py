"""``TorchAttention``: gather the context, softmax in float32. The reference of the fast path."""

import torch

from coterie.attention.kv_cache import KVPair
from coterie.attention.metadata import ForwardBatch


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [num_tokens, heads, head_dim]``; ``cos, sin [num_tokens, 1, head_dim / 2]``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class TorchAttention:
    """See ``AttentionBackend``."""

    name = "torch"

    def warm_up(self, dtype: torch.dtype, head_dim: int) -> None:
        """Nothing to compile."""

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
        head_dim = cos_sin.shape[1]
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
        q, k = _rotate(_norm(q, q_norm, eps), cos, sin), _rotate(_norm(k, k_norm, eps), cos, sin)
        keep = slot_mapping >= 0
        block_size = kv[0].shape[2]
        blocks, offsets = slot_mapping[keep] // block_size, slot_mapping[keep] % block_size
        for cache, rows in zip(kv, (k, v), strict=True):
            cache[blocks, :, offsets, :head_dim] = rows[keep].to(cache.dtype)
        return q.contiguous()

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
        num_heads, head_dim = q.shape[1:]
        num_kv_heads, block_size = kv[0].shape[1:3]
        for index, (start, end) in enumerate(batch.query_start_loc.unfold(0, 2, 1).tolist()):
            start, end = max(start, first_row), min(end, last_row)
            if start >= end:
                continue
            positions = batch.positions[start:end]
            length = int(positions.max()) + 1
            blocks = batch.block_table[index, : -(-length // block_size)].long()
            k, v = (
                cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length, :head_dim].float()
                for cache in kv
            )  # [num_kv_heads, length, head_dim]
            queries = q[start:end].view(end - start, num_kv_heads, -1, head_dim)
            scores = torch.einsum("tkgd,kld->tkgl", queries, k) * scale
            hidden = torch.arange(length) > positions[:, None]
            scores.masked_fill_(hidden[:, None, None], float("-inf"))
            result = torch.einsum("tkgl,kld->tkgd", scores.softmax(-1), v)
            out[start:end] = result.reshape(end - start, num_heads * head_dim)
