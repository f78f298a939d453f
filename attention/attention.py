"""Attention of one layer: qkv projection, rotation and cache write, paged attention, o_proj."""

from typing import Any

import torch

from coterie.attention.backend import AttentionBackend
from coterie.attention.metadata import ForwardBatch
from coterie.attention.models.config import ModelConfig
from coterie.attention.pieces import (
    LINEAR_ROWS,
    YieldPoint,
    attention_rows,
    linear_in_pieces,
    pieces,
)
from coterie.experts.kernels.base import Kernels


class Attention:
    """Weights and cache of one layer.

    Args:
        kv: this layer's K and V of the paged cache.
        cos_sin: ``[max_len, head_dim]`` float32, see ``rope.cos_sin_table``.
        qkv: packed linear ``[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]``.
        o_proj: packed linear ``[hidden_size, num_heads * head_dim]``.
        q_norm: ``[head_dim]`` float32 or None; so is k_norm.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        kernels: Kernels,
        backend: AttentionBackend,
        kv: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        qkv: Any,
        o_proj: Any,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._backend = backend
        self._kv = kv
        self._cos_sin = cos_sin
        self._qkv = qkv
        self._o_proj = o_proj
        self._q_norm = q_norm
        self._k_norm = k_norm

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, max_seq_len: int, poll: YieldPoint | None
    ) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` float32 in and out; writes K and V of all rows first."""
        q = self._project(x, batch, poll)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=torch.float32)
        for first, last in pieces(q.shape[0], attention_rows(max_seq_len), poll):
            self._backend.forward(
                q, self._kv, batch, self._config.attention_scale, out, first, last
            )
        return linear_in_pieces(self._kernels, out, self._o_proj, self._config.hidden_size, poll)

    def _project(
        self, x: torch.Tensor, batch: ForwardBatch, poll: YieldPoint | None
    ) -> torch.Tensor:
        """Queries ``[num_tokens, num_heads, head_dim]``, rotated; K and V go to the cache."""
        if poll is None:
            return self._project_rows(x, batch, 0, x.shape[0])
        config = self._config
        q = torch.empty((x.shape[0], config.num_heads, config.head_dim), dtype=torch.float32)
        for first, last in pieces(x.shape[0], LINEAR_ROWS, poll):
            q[first:last] = self._project_rows(x, batch, first, last)
        return q

    def _project_rows(
        self, x: torch.Tensor, batch: ForwardBatch, first: int, last: int
    ) -> torch.Tensor:
        return self._backend.rope_and_cache(
            self._kernels.linear(x[first:last], self._qkv),
            batch.positions[first:last],
            batch.slot_mapping[first:last],
            self._cos_sin,
            self._kv,
            self._config.num_heads,
            self._config.num_kv_heads,
            self._q_norm,
            self._k_norm,
            self._config.rms_norm_eps,
        )
