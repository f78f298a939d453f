"""The gate: scores the experts of one MoE layer and picks top_k of them for each token.

Called by ``MoELayer``; the weights are replicated on every attention rank. Expert ids are logical
here; the router maps them to physical experts.
"""

from dataclasses import dataclass
from typing import Any

import torch

from coterie.experts.config import MoEConfig
from coterie.experts.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class TopKOutput:
    """What a gate chose for each token."""

    topk_ids: torch.Tensor
    """``[num_tokens, top_k]`` int32 logical expert ids, -1 = none."""
    topk_weights: torch.Tensor
    """``[num_tokens, top_k]`` float32."""


class TopKGate:
    """Softmax scores over all experts, top_k of them, renormalised if the model says so."""

    def __init__(self, kernels: Kernels, packed_linear: Any, moe: MoEConfig) -> None:
        self._kernels = kernels
        self._packed_linear = packed_linear
        self._top_k = moe.top_k
        self._renormalize = moe.norm_topk_prob

    def __call__(self, hidden_states: torch.Tensor) -> TopKOutput:
        """Choose experts.

        Args:
            hidden_states: ``[num_tokens, hidden_size]`` float32.
        """
        router_logits = self._kernels.linear(hidden_states, self._packed_linear)
        topk_weights, topk_ids = self._kernels.topk_softmax(
            router_logits, self._top_k, self._renormalize
        )
        return TopKOutput(topk_ids, topk_weights)
