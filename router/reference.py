"""The slow, obvious MoE over many ranks, which the tests believe.

All-gather: every expert rank sees every row of every attention rank, computes its own experts for
all of them, and each home rank adds the partial sums in seat order. No rounds, no merging.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from coterie.experts.placement import ExpertPlacement
from coterie.router.gate import TopKOutput


def all_gather_moe(
    hidden_states: Sequence[torch.Tensor],
    topk: Sequence[TopKOutput],
    home_seats: Sequence[int],
    w13: torch.Tensor,
    w2: torch.Tensor,
    placement: ExpertPlacement,
) -> list[torch.Tensor]:
    """One MoE layer for the rows of all attention ranks.

    Args:
        hidden_states: per attention rank, ``[num_tokens, hidden]`` float32.
        topk: per attention rank, logical ids and weights.
        home_seats: seat of each attention rank.
        w13: ``[num_experts, 2 * intermediate, hidden]`` of all logical experts, gate rows first.
        w2: ``[num_experts, hidden, intermediate]``.

    Returns:
        per attention rank, ``[num_tokens, hidden]`` float32.
    """
    counts = [len(rows) for rows in hidden_states]
    gathered = torch.cat(list(hidden_states)).to(w13.dtype).float()
    physical = torch.cat(
        [_physical(t, placement, seat) for t, seat in zip(topk, home_seats, strict=True)]
    )
    weights = torch.cat([t.topk_weights for t in topk])
    total = torch.zeros_like(gathered)
    for seat in placement.seats:
        partial = torch.zeros_like(gathered)
        for expert in placement.physical_on(seat):
            logical = placement.physical_to_logical[expert]
            gate, up = F.linear(gathered, w13[logical].float()).chunk(2, dim=-1)
            output = F.linear(F.silu(gate) * up, w2[logical].float())
            share = torch.where(physical == expert, weights, 0.0).sum(dim=-1, keepdim=True)
            partial += share * output
        total += partial
    return list(total.split(counts))


def _physical(topk: TopKOutput, placement: ExpertPlacement, home_seat: int) -> torch.Tensor:
    table = torch.from_numpy(placement.logical_to_physical(home_seat))
    table = torch.cat([table, table.new_tensor([-1])])  # index -1 stays -1
    return table[topk.topk_ids.long()]
