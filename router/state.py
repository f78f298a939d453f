"""The one word a seat publishes about where it is."""

from enum import IntEnum
from typing import NamedTuple


class StepKind(IntEnum):
    IDLE = 0
    """Not inside a step and no work: nobody waits for it."""
    BETWEEN = 1
    """Between two steps with work pending: about to start at layer 0."""
    DECODE = 2
    """Inside a small step: gathers wait for it."""
    BIG = 3
    """Inside a big step (long prefill): nobody waits for it."""


_KINDS = tuple(StepKind)


class SeatState(NamedTuple):
    """Published by a seat, read by its peers without a message. Fits in 64 bits."""

    epoch: int
    step: int
    """Step counter of the seat, modulo 2**24."""
    layer: int
    """Layer the seat is in or about to dispatch."""
    kind: StepKind

    def pack(self) -> int:
        return (
            (self.epoch & 0x7FFFFF) << 40
            | (self.step & 0xFFFFFF) << 16
            | (self.layer & 0xFFF) << 4
            | self.kind
        )

    @staticmethod
    def unpack(word: int) -> "SeatState":
        return SeatState(
            epoch=word >> 40 & 0x7FFFFF,
            step=word >> 16 & 0xFFFFFF,
            layer=word >> 4 & 0xFFF,
            kind=_KINDS[word & 0xF],
        )
