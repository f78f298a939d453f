"""The decoder of every family: embedding, layers, final norm, logits.

Built by ``models/loader.py`` from a ModelConfig; called by the model runner once a step.
Activations and the residual stream are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coterie.attention.attention import Attention
from coterie.attention.embedding import Embedding, LMHead
from coterie.attention.metadata import ForwardBatch
from coterie.attention.models.config import ModelConfig
from coterie.attention.norm import RMSNorm
from coterie.attention.pieces import LINEAR_ROWS, YieldPoint, pieces
from coterie.experts.dense_mlp import DenseMLP
from coterie.router.moe_layer import MoELayer
from coterie.router.token_router import TokenRouter


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """Parts of one layer."""

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: MoELayer | DenseMLP
    router_layer: int | None
    """What the router is told on entry: the index among the MoE layers; None for a dense layer
    between them. In a dense model the index of the layer, as a sign of life."""


class Decoder:
    """One model on one attention rank."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        lm_head: LMHead,
        router: TokenRouter,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._lm_head = lm_head
        self._router = router

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step: write K and V of all rows, return logits of ``batch.logits_rows``.

        Returns:
            ``[num_sampled, vocab_size]`` float32.

        Raises:
            RankDied, EpochChanged: from the router; the step may be run again from its start.

        Blocks: in the exchange of each MoE layer, serving other ranks meanwhile.
        """
        if batch.num_tokens == 0:
            return torch.empty((0, self.config.vocab_size), dtype=torch.float32)
        poll = self._router.poll if batch.big and self.config.moe is not None else None
        max_seq_len = int(batch.seq_lens.max())
        scale = self.config.residual_multiplier
        residual = self._embedding.forward(batch.input_ids)
        branch: torch.Tensor | None = None
        for layer in self._layers:
            if layer.router_layer is not None:
                # Early, so that peers about to compute this layer see that a round is coming.
                self._router.enter_layer(layer.router_layer)
            if branch is None:
                x = layer.input_norm.forward(residual)
            else:
                x = layer.input_norm.add_forward(residual, branch, scale)
            branch = layer.attention.forward(x, batch, max_seq_len, poll)
            x = layer.post_attention_norm.add_forward(residual, branch, scale)
            branch = _mlp(layer.mlp, x, poll)
        return self._logits(residual, branch, batch.logits_rows)

    def _logits(
        self, residual: torch.Tensor, branch: torch.Tensor | None, rows: torch.Tensor
    ) -> torch.Tensor:
        """Final norm and projection of the wanted rows only."""
        assert branch is not None, "a decoder without layers"
        x = self._norm.add_forward(
            residual.index_select(0, rows),
            branch.index_select(0, rows),
            self.config.residual_multiplier,
        )
        return self._lm_head.forward(x)


def _mlp(mlp: MoELayer | DenseMLP, x: torch.Tensor, poll: YieldPoint | None) -> torch.Tensor:
    """The router cuts MoE layers itself; dense ones are cut here."""
    if isinstance(mlp, MoELayer) or poll is None:
        return mlp.forward(x)
    out = torch.empty_like(x)
    for first, last in pieces(x.shape[0], LINEAR_ROWS, poll):
        out[first:last] = mlp.forward(x[first:last])
    return out
