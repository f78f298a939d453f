"""A round: what one attention rank sends to one expert rank for one layer, and its reply.

Tuples, because one is made for every round received and frozen dataclasses are slow to make.
"""

from enum import IntEnum
from typing import NamedTuple

from coterie.experts.rows import Rows


class RoundKind(IntEnum):
    """What the receiver computes. More kinds (attention heads, vocabulary slice) may follow."""

    EXPERTS = 1


class RoundHeader(NamedTuple):
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


class Round(NamedTuple):
    """A received request."""

    header: RoundHeader
    rows: Rows
    """Valid until the reply is posted; ``rows.out`` is the reserved place of the reply."""
