"""A round: what one attention rank sends to one expert rank for one layer, and its reply."""

from dataclasses import dataclass
from enum import IntEnum

import torch


class RoundKind(IntEnum):
    """What the receiver computes. More kinds (attention heads, vocabulary slice) may follow."""

    EXPERTS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundHeader:
    epoch: int
    source: int
    """Seat of the sender."""
    layer: int
    sequence: int
    """Per ordered pair of seats, from 1, no gaps."""
    num_tokens: int
    big: bool
    """True: a resumable job, computed by pieces of experts between small rounds."""
    kind: RoundKind = RoundKind.EXPERTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A received request. Tensors are views that stay valid until the reply is posted."""

    header: RoundHeader
    hidden_states: torch.Tensor
    """``[num_tokens, hidden_size]`` model dtype."""
    topk_ids: torch.Tensor
    """``[num_tokens, top_k]`` int32 physical expert ids, -1 = not on this rank."""
    topk_weights: torch.Tensor
    """``[num_tokens, top_k]`` float32."""
    out: torch.Tensor
    """``[num_tokens, hidden_size]`` float32, reserved place of the reply (not zeroed)."""
