"""The compute seam of linears, norms and experts.

Every implementation computes with float32 activations and float32 accumulation; weights stay in
the model dtype. ``NumbaKernels`` (CPU fast path) guarantees that a row's result is bit-identical
whatever other rows are in the call; ``TorchKernels`` is the slow, obvious reference and does not.
"""

from typing import Any, Protocol

import torch


class Kernels(Protocol):
    """One backend. Objects returned by ``pack_*`` are opaque and belong to the same backend."""

    name: str

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile or load all that weights of ``dtype`` need, so that no step waits for it."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Prepare ``weight [out_features, in_features]`` (float32 or bfloat16) for ``linear``."""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """``x [num_tokens, in_features] float32 -> [num_tokens, out_features] float32``, new."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise over the last dim. ``x [..., dim] float32``, ``weight [dim] float32``, new."""

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        scale: float,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """``residual += scale * x`` in place, then return ``rms_norm(residual)``, new."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, 2 * width] -> silu(first half) * second half``, float32, new."""

    def topk_softmax(
        self, router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax over all experts, then the ``top_k`` largest, largest first.

        Args:
            router_logits: ``[num_tokens, num_experts]`` float32.
            renormalize: scale the chosen weights to sum to 1.

        Returns:
            ``topk_weights [num_tokens, top_k]`` float32, ``topk_ids [num_tokens, top_k]`` int32;
            ties go to the lowest expert id.
        """

    def pack_experts(self, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        """Prepare local experts.

        Args:
            w13: ``[num_local, 2 * intermediate, hidden]``, gate rows first, then up rows.
            w2: ``[num_local, hidden, intermediate]``.
        """

    def experts(
        self,
        hidden_states: torch.Tensor,
        local_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        packed: Any,
        out: torch.Tensor,
        first: int,
        last: int,
    ) -> None:
        """Add the weighted outputs of local experts ``first..last-1`` to ``out``.

        Args:
            hidden_states: ``[num_tokens, hidden]`` model dtype (float32 or bfloat16).
            local_ids: ``[num_tokens, top_k]`` int32, -1 = no local expert.
            topk_weights: ``[num_tokens, top_k]`` float32.
            out: ``[num_tokens, hidden]`` float32, accumulated in ascending order of local expert,
                so that calls over consecutive ranges equal one call over the whole range.
        """
