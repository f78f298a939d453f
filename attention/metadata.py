"""What one forward pass needs to know about its rows."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """Rows of one step on one attention rank; requests are consecutive runs of rows."""

    input_ids: torch.Tensor
    """``[num_tokens]`` int64."""
    positions: torch.Tensor
    """``[num_tokens]`` int64, position of each row in its request."""
    slot_mapping: torch.Tensor
    """``[num_tokens]`` int64, cache slot that receives the row's K and V."""
    query_start_loc: torch.Tensor
    """``[num_reqs + 1]`` int32, prefix sums of rows per request."""
    seq_lens: torch.Tensor
    """``[num_reqs]`` int32, context length including this step's rows."""
    block_table: torch.Tensor
    """``[num_reqs, max_blocks]`` int32, padded with 0."""
    logits_rows: torch.Tensor
    """``[num_sampled]`` int64, rows whose logits are wanted."""
    big: bool
    """True for a step that is cut into pieces and that nobody waits for (see router.state)."""

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])
