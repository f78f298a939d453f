"""Cuts the rows of a big step into pieces, so that the rank can serve its peers between them.

A rank that computes for long without polling makes everybody wait who needs its experts. With the
numba kernels a row's result is the same in whatever piece it is computed.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from coterie.experts.kernels.base import Kernels

YieldPoint = Callable[[], None]
"""Called between pieces (``TokenRouter.poll``); None = do not cut."""

LINEAR_ROWS: Final = 64
"""Rows of a linear per piece: enough that re-reading the weights costs little beside compute."""
ATTENTION_ROWS: Final = 32
LONG_CONTEXT: Final = 1024
"""Beyond this context a piece of attention has half the rows."""


def pieces(num_rows: int, size: int, poll: YieldPoint | None) -> Iterator[tuple[int, int]]:
    """``(first, last)`` runs of at most ``size`` rows, polling after each; one run without poll."""
    if poll is None:
        if num_rows:
            yield 0, num_rows
        return
    for first in range(0, num_rows, size):
        yield first, min(first + size, num_rows)
        poll()


def attention_rows(max_seq_len: int) -> int:
    """Rows of a piece of attention over contexts of this length."""
    return ATTENTION_ROWS if max_seq_len <= LONG_CONTEXT else ATTENTION_ROWS // 2


def linear_in_pieces(
    kernels: Kernels, x: torch.Tensor, packed: Any, out_features: int, poll: YieldPoint | None
) -> torch.Tensor:
    """``kernels.linear``, cut into pieces when there is a yield point."""
    if poll is None or x.shape[0] <= LINEAR_ROWS:
        return kernels.linear(x, packed)
    out = torch.empty((x.shape[0], out_features), dtype=torch.float32)
    for first, last in pieces(x.shape[0], LINEAR_ROWS, poll):
        out[first:last] = kernels.linear(x[first:last], packed)
    return out
