"""The seam of attention over the paged KV cache, and the choice of its implementation."""

from typing import Protocol

import torch

from coterie.attention.kv_cache import KVPair
from coterie.attention.metadata import ForwardBatch
from coterie.experts.kernels.select import resolve_backend


class AttentionBackend(Protocol):
    """One layer's K and V come as ``kv``, see ``PagedKVCache.layer``.

    ``NumbaAttention`` guarantees that a row's result is bit-identical whatever other rows are in
    the batch and in whatever chunks its prompt arrives; ``TorchAttention`` does not.
    """

    name: str

    def warm_up(self, dtype: torch.dtype, head_dim: int) -> None:
        """Compile or load all that a cache of ``dtype`` needs, so that no step waits for it."""

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
        """Norm the heads, rotate them (rotate_half convention), write K and V to their slots.

        Args:
            qkv: ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`` float32.
            positions: ``[num_tokens]`` int64, rows of ``cos_sin``.
            slot_mapping: ``[num_tokens]`` int64; -1 = do not keep this row's K and V.
            cos_sin: ``[max_len, head_dim]`` float32, cosines of head_dim / 2 frequencies, then
                sines.
            q_norm: ``[head_dim]`` float32 weight of an RMS norm per head, or None.
            k_norm: likewise for K.

        Returns:
            ``q [num_tokens, num_heads, head_dim]`` float32, new.
        """

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
        """Attention of rows ``first_row..last_row-1`` over positions 0 to their own, into ``out``.

        All K and V of the batch must have been written before.

        Args:
            q: ``[num_tokens, num_heads, head_dim]`` float32.
            out: ``[num_tokens, num_heads * head_dim]`` float32; other rows are left alone.
        """


def select_attention(name: str) -> AttentionBackend:
    """A new backend object for one compute thread.

    Raises:
        ConfigError: no such backend.
    """
    if resolve_backend(name) == "numba":
        from coterie.attention.numba_attention import NumbaAttention

        return NumbaAttention()
    from coterie.attention.torch_attention import TorchAttention

    return TorchAttention()
