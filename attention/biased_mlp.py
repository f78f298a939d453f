"""``BiasedMLP``: the gated MLP of a dense layer whose projections have biases (``mlp_bias``).

The usual MLP without biases is ``experts.dense_mlp.DenseMLP``; same contract.
"""

import torch

from coterie.experts.kernels.base import Kernels


class BiasedMLP:
    """down(silu(gate(x)) * up(x)) with a bias on each of the three.

    Args:
        gate_up: ``[2 * intermediate, hidden]``, gate rows first; bias likewise.
        down: ``[hidden, intermediate]``.
    """

    def __init__(
        self,
        kernels: Kernels,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor,
        down: torch.Tensor,
        down_bias: torch.Tensor,
    ) -> None:
        self._kernels = kernels
        self._gate_up = kernels.pack_linear(gate_up, gate_up_bias)
        self._down = kernels.pack_linear(down, down_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden]`` float32 -> the same shape, new."""
        kernels = self._kernels
        return kernels.linear(kernels.silu_mul(kernels.linear(x, self._gate_up)), self._down)
