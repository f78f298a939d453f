"""Both ends of the decoder: token embedding and the projection to the vocabulary."""

from typing import Any

import torch

from coterie.experts.kernels.base import Kernels


class Embedding:
    """Args: weight ``[vocab_size, hidden_size]`` model dtype."""

    def __init__(self, weight: torch.Tensor, multiplier: float) -> None:
        self._weight = weight
        self._multiplier = multiplier

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[num_tokens]`` int64 -> ``[num_tokens, hidden_size]`` float32, new."""
        rows = self._weight.index_select(0, input_ids).float()
        return rows if self._multiplier == 1.0 else rows.mul_(self._multiplier)


class LMHead:
    """Args: packed: ``kernels.pack_linear`` of ``[vocab_size, hidden_size]``."""

    def __init__(self, kernels: Kernels, packed: Any, scale: float) -> None:
        self._kernels = kernels
        self._packed = packed
        self._scale = scale

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[num_sampled, hidden_size]`` -> ``[num_sampled, vocab_size]`` float32 logits."""
        logits = self._kernels.linear(hidden_states, self._packed)
        return logits if self._scale == 1.0 else logits.mul_(self._scale)
