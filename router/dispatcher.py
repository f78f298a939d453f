"""Cuts a batch of rows into one round per expert rank, and adds the replies up at home.

A token goes once to each expert rank that has at least one of its experts and comes back as one
weighted partial sum. Partial sums are added in seat order, so a token's sum does not depend on
who answered first. Rows are written once, straight to where the experts will read them; the own
ones to a buffer here, in the same form as a round.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from coterie.experts.kernels.base import Kernels
from coterie.experts.placement import ExpertPlacement
from coterie.experts.rows import Partial, RowBuffer, Rows
from coterie.router.gate import TopKOutput
from coterie.router.transports.base import Transport


class SentRound(NamedTuple):
    peer: int
    sequence: int
    num_tokens: int


class DispatchHandle(NamedTuple):
    """What ``combine`` needs to know of a dispatch. One per rank is open at a time."""

    num_tokens: int
    own: Rows | None
    """The rows with an expert on this rank; the experts write their partial sums to ``out``."""
    sent: list[SentRound]
    """Ascending by peer."""


def routing_tables(placement: ExpertPlacement, home_seat: int) -> dict[int, torch.Tensor]:
    """Per expert rank, ascending: ``[num_experts]`` int32, logical -> physical expert there or -1.

    An expert with replicas is in exactly one table of a home seat.
    """
    chosen = placement.logical_to_physical(home_seat)
    seats = placement.physical_seats[chosen]
    return {
        seat: torch.from_numpy(np.where(seats == seat, chosen, -1).astype(np.int32))
        for seat in placement.seats
    }


class TokenDispatcher:
    """Dispatch and combine of one attention rank."""

    def __init__(
        self,
        transport: Transport,
        tables: dict[int, torch.Tensor],
        kernels: Kernels,
        dtype: torch.dtype,
    ) -> None:
        """Args:
        tables: see ``routing_tables``.
        dtype: what rows are rounded to, the own ones too.
        """
        self._transport = transport
        self._tables = tables
        self._kernels = kernels
        self._dtype = dtype
        self._outstanding: dict[int, deque[int]] = {
            seat: deque() for seat in tables if seat != transport.seat
        }
        self._own: RowBuffer | None = None
        self._index: dict[int, torch.Tensor] = {}
        """Per expert rank, which rows of the batch it has been given."""

    def dispatch(
        self, layer: int, hidden_states: torch.Tensor, topk: TopKOutput, *, big: bool
    ) -> DispatchHandle:
        """Post the rows to the expert ranks that need them, then set the own ones aside.

        Args:
            hidden_states: ``[num_tokens, hidden_size]`` float32, at most ``transport.max_rows``
                rows.

        Raises:
            RankDied: one of those ranks is gone.
        """
        transport, num_tokens = self._transport, len(hidden_states)
        if self._own is None or self._own.capacity < num_tokens:
            self._grow(num_tokens, hidden_states.shape[1], topk.topk_ids.shape[1])
        sent = []
        for peer, outstanding in self._outstanding.items():
            count = self._route(peer, hidden_states, topk, transport.reserve(peer, num_tokens))
            if count:
                sequence = transport.post(peer, layer, count, big=big)
                outstanding.append(sequence)
                sent.append(SentRound(peer, sequence, count))
        own = None
        if transport.seat in self._tables:
            assert self._own is not None
            count = self._route(transport.seat, hidden_states, topk, self._own)
            own = Rows(self._own, count) if count else None
        return DispatchHandle(num_tokens, own, sent)

    def _route(
        self, seat: int, hidden_states: torch.Tensor, topk: TopKOutput, into: RowBuffer
    ) -> int:
        return self._kernels.route(
            hidden_states,
            topk.topk_ids,
            topk.topk_weights,
            self._tables[seat],
            into,
            self._index[seat],
        )

    def _grow(self, num_tokens: int, hidden_size: int, top_k: int) -> None:
        capacity = max(64, 1 << (num_tokens - 1).bit_length())
        self._own = RowBuffer.empty(capacity, hidden_size, top_k, self._dtype)
        self._index = {seat: torch.empty(capacity, dtype=torch.int32) for seat in self._tables}

    def replies_here(self, handle: DispatchHandle) -> Callable[[], bool]:
        """A predicate: has every round of ``handle`` been answered?"""
        missing = list(handle.sent)

        def done() -> bool:
            while missing:
                sent = missing[-1]
                if self._transport.poll_reply(sent.peer, sent.sequence) is None:
                    return False
                missing.pop()
            return True

        return done

    def unanswered(self) -> list[int]:
        """Peers that owe a reply."""
        return [
            peer
            for peer, outstanding in self._outstanding.items()
            if outstanding and self._transport.poll_reply(peer, outstanding[0]) is None
        ]

    def drain(self) -> bool:
        """Give back what an aborted step left; True once nothing is outstanding."""
        for peer, outstanding in self._outstanding.items():
            while outstanding and self._transport.poll_reply(peer, outstanding[0]) is not None:
                self._transport.release(peer, outstanding.popleft())
        return not any(self._outstanding.values())

    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        """Add the own partial sums and the replies, in seat order.

        Returns:
            ``[num_tokens, hidden_size]`` float32, new.
        """
        partials = {sent.peer: self._reply(sent) for sent in handle.sent}
        seat, own = self._transport.seat, handle.own
        if own is not None:
            partials[seat] = Partial(own.buffer.out, self._index[seat], own.num_tokens)
        in_order = [partials[seat] for seat in self._tables if seat in partials]
        output = self._kernels.combine(in_order, handle.num_tokens)
        for sent in handle.sent:
            self._transport.release(sent.peer, sent.sequence)
            self._outstanding[sent.peer].popleft()
        return output

    def _reply(self, sent: SentRound) -> Partial:
        reply = self._transport.poll_reply(sent.peer, sent.sequence)
        assert reply is not None, "combine follows the wait for all replies"
        return Partial(reply, self._index[sent.peer], sent.num_tokens)
