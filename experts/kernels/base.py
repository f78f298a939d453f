"""The compute seam of linears, norms, experts and the moving of rows to and from them.

Every implementation computes with float32 activations and float32 accumulation; weights stay in
the model dtype. ``NumbaKernels`` (CPU fast path) guarantees that a row's result is bit-identical
whatever other rows are in the call; ``TorchKernels`` is the slow, obvious reference and does not.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from coterie.experts.rows import Partial, RowBuffer, Rows


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
        segments: Sequence[Rows],
        physical_ids: torch.Tensor,
        packed: Any,
        first: int,
        last: int,
        counts: torch.Tensor,
    ) -> None:
        """Compute local experts ``first..last-1`` for the rows of all segments, in place.

        Each ``out`` becomes the sum of the weighted outputs in ascending order of local expert: a
        call with ``first == 0`` sets it, others add to it, so that calls over consecutive ranges
        equal one call over the whole range. A row's sum does not depend on the other segments.

        Args:
            segments: of one hidden size and top_k, in the dtype of the weights.
            physical_ids: ``[num_local]`` int32, the id by which rows name each local expert; ids
                of other experts are ignored.
            counts: ``[num_local]`` int64, rows computed per local expert are added.
        """

    def route(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        table: torch.Tensor,
        into: RowBuffer,
        index: torch.Tensor,
    ) -> int:
        """Copy the rows that have an expert in ``table`` to the start of ``into``.

        Args:
            hidden_states: ``[num_tokens, hidden_size]`` float32, rounded to the dtype of ``into``.
            topk_ids: ``[num_tokens, top_k]`` int32 logical experts, -1 = none.
            topk_weights: ``[num_tokens, top_k]`` float32.
            table: ``[num_experts]`` int32, logical -> physical expert, -1 = not there.
            into: room for ``num_tokens`` rows; its ``out`` is not touched.
            index: ``[>= num_tokens]`` int32, receives which row each copy is.

        Returns:
            The number of rows copied.
        """

    def combine(self, partials: Sequence[Partial], num_tokens: int) -> torch.Tensor:
        """Add partial sums in the order given; rows without any are 0.

        Args:
            partials: at least one.

        Returns:
            ``[num_tokens, hidden_size]`` float32, new.
        """
