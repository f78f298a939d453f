"""The one word a seat publishes about where it is."""

from dataclasses import dataclass
from enum import IntEnum


class StepKind(IntEnum):
    IDLE = 0
    """Not inside a step and no work: nobody waits for it."""
    BETWEEN = 1
    """Between two steps with work pending: about to start at layer 0."""
    DECODE = 2
    """Inside a small step: gathers wait for it."""
    BIG = 3
    """Inside a big step (long prefill): nobody waits for it."""


@dataclass(frozen=True, slots=True)
class SeatState:
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
            | int(self.kind)
        )

    @staticmethod
    def unpack(word: int) -> "SeatState":
        return SeatState(
            epoch=word >> 40 & 0x7FFFFF,
            step=word >> 16 & 0xFFFFFF,
            layer=word >> 4 & 0xFFF,
            kind=StepKind(word & 0xF),
        )
