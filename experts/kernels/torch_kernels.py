"""``TorchKernels``: the slow, obvious reference in plain torch, float32 throughout."""

import torch
import torch.nn.functional as F


class TorchKernels:
    """See ``Kernels``. Rows are not guaranteed to be independent of each other bit for bit."""

    name = "torch"

    def warm_up(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Nothing to compile."""

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return weight, None if bias is None else bias.float()

    def linear(
        self, x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor | None]
    ) -> torch.Tensor:
        weight, bias = packed
        return F.linear(x, weight.float(), bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        scale: float,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        residual += scale * x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def topk_softmax(
        self, router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # torch.topk leaves the order of ties open; a stable sort does not.
        order = router_logits.argsort(dim=-1, descending=True, stable=True)
        ids = order[:, :top_k]
        weights = router_logits.softmax(-1).gather(1, ids)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.contiguous(), ids.to(torch.int32).contiguous()

    def pack_experts(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return w13, w2

    def experts(
        self,
        hidden_states: torch.Tensor,
        local_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        packed: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        first: int,
        last: int,
    ) -> None:
        w13, w2 = packed
        for expert in range(first, last):
            rows, slots = (local_ids == expert).nonzero(as_tuple=True)
            x = hidden_states[rows].float()
            y = self.silu_mul(x @ w13[expert].float().T) @ w2[expert].float().T
            out.index_add_(0, rows, topk_weights[rows, slots, None] * y)
