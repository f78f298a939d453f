"""``DenseMLP``: the gated MLP of a dense decoder layer; called by the decoder, no routing."""

import torch

from coterie.experts.kernels.base import Kernels


class DenseMLP:
    """down(silu(gate(x)) * up(x)).

    Args:
        gate_up: ``[2 * intermediate, hidden]``, gate rows first.
        down: ``[hidden, intermediate]``.
        gate_up_bias, down_bias: one value per row of these, or None.
    """

    def __init__(
        self,
        kernels: Kernels,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        self._kernels = kernels
        self._gate_up = kernels.pack_linear(gate_up, gate_up_bias)
        self._down = kernels.pack_linear(down, down_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden]`` float32 -> the same shape, new."""
        kernels = self._kernels
        return kernels.linear(kernels.silu_mul(kernels.linear(x, self._gate_up)), self._down)
