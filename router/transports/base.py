"""The transport protocol: post, poll, wait with a deadline, close, epoch fence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from coterie.experts.rows import RowBuffer
from coterie.router.round import Round
from coterie.router.state import SeatState, StepKind

GONE = SeatState(epoch=0, step=0, layer=0, kind=StepKind.IDLE)
"""State of a dead seat: nobody waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundShape:
    """Sizes that both ends of every pair must agree on."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype
    """Of the dispatched hidden states: float32 or bfloat16."""
    max_rows: int
    """Most rows of one round."""
    num_slots: int = 2
    """Rounds of one ordered pair that may be outstanding."""


class Transport(Protocol):
    """Moves rounds between this seat and its peers within one epoch.

    Not thread-safe: one thread of the rank uses it. At most ``num_slots`` rounds per ordered pair
    are outstanding; the reply slot of a round is reserved when the round is posted, so ``reply``
    never blocks. Rounds of another epoch are dropped and counted, never delivered.
    """

    seat: int
    epoch: int
    peers: tuple[int, ...]
    max_rows: int
    """Most rows one round can carry; callers cut larger ones."""
    num_stale: int
    """Messages dropped because their epoch was older."""

    def reserve(self, peer: int, num_tokens: int) -> RowBuffer:
        """Room for the next round to ``peer``, at least ``num_tokens`` rows; filled by the caller.

        The caller releases an old reply before it has more than ``num_slots`` rounds outstanding.
        A place that is not posted is given out again.
        """

    def post(self, peer: int, layer: int, num_tokens: int, *, big: bool) -> int:
        """Send the first ``num_tokens`` rows of the reserved place; return the sequence number.

        Raises:
            RankDied: the peer is known to be gone.
        """

    def poll(self, peer: int) -> Round | None:
        """The oldest round of ``peer`` that has not been replied to, or None. Does not consume."""

    def reply(self, round: Round) -> None:
        """Announce that ``round.rows.out`` is complete. Never blocks."""

    def poll_reply(self, peer: int, sequence: int) -> torch.Tensor | None:
        """``[num_tokens, hidden_size]`` float32 view, valid until ``release``, or None yet.

        Raises:
            RankDied: the peer is gone, and the reply did not come before.
        """

    def release(self, peer: int, sequence: int) -> None:
        """Give the slot of a consumed reply back."""

    def publish(self, state: SeatState) -> None:
        """Let every peer see where this seat is."""

    def peer_state(self, peer: int) -> SeatState:
        """Last state published by ``peer``; ``GONE`` once it is dead."""

    def block(self, timeout_s: float, wake_fds: Sequence[int] = ()) -> bool:
        """Sleep until a doorbell or one of ``wake_fds`` is readable; True if one of the latter.

        May return early. A round or reply that came since the last call ends it at once.

        Raises:
            RankDied: the link of a peer closed; once per peer.
        Blocks: at most ``timeout_s``.
        """

    def close(self) -> None:
        """Release everything; idempotent."""
