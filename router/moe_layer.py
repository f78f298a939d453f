"""One MoE layer of a decoder: gate, then dispatch, experts and combine through the token router.

Called by the decoder with normed hidden states. The four verbs: the gate is here, the other three
are one screen in ``TokenRouter.forward``.
"""

import torch

from coterie.router.gate import TopKGate
from coterie.router.token_router import TokenRouter


class MoELayer:
    """Owns the gate of one layer; shares the rank's router with all layers."""

    def __init__(self, gate: TopKGate, router: TokenRouter, layer: int) -> None:
        self.gate = gate
        self.router = router
        self.layer = layer
        """Index among the model's MoE layers."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` float32 in and out.

        Raises:
            RankDied: an expert rank is gone or does not answer.
            EpochChanged: the membership moved on while this layer was waiting.
        """
        topk = self.gate(hidden_states)
        return self.router.forward(self.layer, hidden_states, topk)
