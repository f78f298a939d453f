"""``TorchKernels``: the slow, obvious reference in plain torch, float32 throughout."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from coterie.experts.rows import Partial, RowBuffer, Rows


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
        segments: Sequence[Rows],
        physical_ids: torch.Tensor,
        packed: tuple[torch.Tensor, torch.Tensor],
        first: int,
        last: int,
        counts: torch.Tensor,
    ) -> None:
        w13, w2 = packed
        for segment in segments:
            out = segment.out
            if first == 0:
                out.zero_()
            for expert in range(first, last):
                named = segment.topk_ids == physical_ids[expert]
                rows, slots = named.nonzero(as_tuple=True)
                x = segment.hidden_states[rows].float()
                y = self.silu_mul(x @ w13[expert].float().T) @ w2[expert].float().T
                out.index_add_(0, rows, segment.topk_weights[rows, slots, None] * y)
                counts[expert] += len(rows)

    def route(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        table: torch.Tensor,
        into: RowBuffer,
        index: torch.Tensor,
    ) -> int:
        physical = torch.cat([table, table.new_tensor([-1])])[topk_ids.long()]  # -1 stays -1
        rows = (physical >= 0).any(dim=1).nonzero()[:, 0]
        count = len(rows)
        into.hidden_states[:count] = hidden_states[rows]
        into.topk_ids[:count] = physical[rows]
        into.topk_weights[:count] = topk_weights[rows]
        index[:count] = rows
        return count

    def combine(self, partials: Sequence[Partial], num_tokens: int) -> torch.Tensor:
        total = torch.zeros(num_tokens, partials[0].sums.shape[1])
        for sums, index, count in partials:
            total.index_add_(0, index[:count], sums[:count])
        return total
