"""Rows on their way through experts: where they lie and how many there are.

The router fills the buffers (its own, or slots shared with a peer) and the kernels read and write
them in place, by address. A buffer lives long and is described once; only the number of rows
changes from layer to layer, because making views of tensors costs more than moving a few rows.
"""

from typing import NamedTuple

import torch


class RowBuffer:
    """Memory of up to ``capacity`` rows, their routing and their output. All contiguous."""

    __slots__ = (
        "addresses",
        "capacity",
        "hidden_size",
        "hidden_states",
        "out",
        "top_k",
        "topk_ids",
        "topk_weights",
    )

    def __init__(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Args:
        hidden_states: ``[capacity, hidden_size]`` model dtype (float32 or bfloat16).
        topk_ids: ``[capacity, top_k]`` int32 physical experts, -1 = none. A row names an
            expert once.
        topk_weights: ``[capacity, top_k]`` float32.
        out: ``[capacity, hidden_size]`` float32.
        """
        assert hidden_states.shape == out.shape, (hidden_states.shape, out.shape)
        assert topk_ids.shape == topk_weights.shape, (topk_ids.shape, topk_weights.shape)
        assert len(topk_ids) == len(out), (topk_ids.shape, out.shape)
        assert (topk_ids.dtype, topk_weights.dtype) == (torch.int32, torch.float32)
        assert out.dtype is torch.float32, out.dtype
        tensors = (hidden_states, topk_ids, topk_weights, out)
        assert all(tensor.is_contiguous() for tensor in tensors), "not contiguous"
        self.capacity, self.hidden_size = out.shape
        self.top_k = topk_ids.shape[1]
        self.hidden_states, self.topk_ids, self.topk_weights, self.out = tensors
        self.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        """Of the four arrays, in the order of the arguments."""

    @classmethod
    def empty(cls, capacity: int, hidden_size: int, top_k: int, dtype: torch.dtype) -> "RowBuffer":
        """A private buffer of arbitrary content."""
        return cls(
            torch.empty((capacity, hidden_size), dtype=dtype),
            torch.empty((capacity, top_k), dtype=torch.int32),
            torch.empty((capacity, top_k), dtype=torch.float32),
            torch.empty((capacity, hidden_size), dtype=torch.float32),
        )


class Rows(NamedTuple):
    """The first ``num_tokens`` rows of a buffer. The properties make views; kernels need none."""

    buffer: RowBuffer
    num_tokens: int

    @property
    def hidden_states(self) -> torch.Tensor:
        return self.buffer.hidden_states[: self.num_tokens]

    @property
    def topk_ids(self) -> torch.Tensor:
        return self.buffer.topk_ids[: self.num_tokens]

    @property
    def topk_weights(self) -> torch.Tensor:
        return self.buffer.topk_weights[: self.num_tokens]

    @property
    def out(self) -> torch.Tensor:
        return self.buffer.out[: self.num_tokens]


class Partial(NamedTuple):
    """Partial sums of one rank for some rows of a batch."""

    sums: torch.Tensor
    """``[>= num_tokens, hidden_size]`` float32, contiguous."""
    row_index: torch.Tensor
    """``[>= num_tokens]`` int32: which row of the batch each one belongs to, ascending."""
    num_tokens: int
