"""RMSNorm bound to its weight; alone, or fused with the addition to the residual stream."""

import torch

from coterie.experts.kernels.base import Kernels


class RMSNorm:
    """Args: weight ``[hidden_size]`` float32."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` float32, new."""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
        """``residual += scale * x`` in place, then the norm of it, new."""
        return self._kernels.add_rms_norm(residual, x, scale, self._weight, self._eps)
