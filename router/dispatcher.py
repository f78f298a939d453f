"""Cuts a batch of rows into one round per expert rank, and adds the replies up at home.

A token goes once to each expert rank that has at least one of its experts and comes back as one
weighted partial sum. Partial sums are added in seat order, so a token's sum does not depend on
who answered first.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from coterie.experts.placement import ExpertPlacement
from coterie.router.gate import TopKOutput
from coterie.router.transports.base import Transport


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with routing in physical ids; the shape that experts take."""

    hidden_states: torch.Tensor
    """``[num_tokens, hidden_size]`` model dtype."""
    topk_ids: torch.Tensor
    """``[num_tokens, top_k]`` int32 physical ids; ids of other ranks or -1 are ignored."""
    topk_weights: torch.Tensor
    """``[num_tokens, top_k]`` float32."""


@dataclass(frozen=True, slots=True)
class SentRound:
    peer: int
    sequence: int
    rows: torch.Tensor | None
    """``[num_sent]`` int64 rows of the batch, None = all of them."""


@dataclass(frozen=True, slots=True)
class DispatchHandle:
    """What ``combine`` needs to know of a dispatch."""

    num_tokens: int
    own: Rows | None
    """All rows, if any of them has an expert on this rank."""
    sent: tuple[SentRound, ...]
    """Ascending by peer."""


class RoutingTable:
    """Index math from logical experts to rounds, for one home seat. Pure."""

    def __init__(self, placement: ExpertPlacement, home_seat: int) -> None:
        chosen = placement.logical_to_physical(home_seat)
        seats = placement.physical_seats[chosen]
        self.expert_seats = placement.seats
        # Per seat: logical -> physical expert there, else -1. One more element at the end, so
        # that id -1 stays -1.
        self._tables = {
            seat: np.append(np.where(seats == seat, chosen, np.int32(-1)), np.int32(-1))
            for seat in self.expert_seats
        }

    def ids_on(self, seat: int, topk_ids: np.ndarray) -> np.ndarray:
        """``[num_tokens, top_k]`` logical ids -> physical ids on ``seat``, -1 = not there."""
        table = self._tables.get(seat)
        return np.full_like(topk_ids, -1) if table is None else table[topk_ids]

    def rows_for(self, seat: int, topk_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows with an expert on ``seat``, and the physical ids of these rows."""
        ids = self.ids_on(seat, topk_ids)
        rows = np.flatnonzero(ids.max(axis=1) >= 0)
        return rows, ids if len(rows) == len(ids) else ids[rows]


class TokenDispatcher:
    """Dispatch and combine of one attention rank."""

    def __init__(self, transport: Transport, table: RoutingTable) -> None:
        self._transport = transport
        self._table = table
        self._outstanding: dict[int, deque[int]] = {
            seat: deque() for seat in table.expert_seats if seat != transport.seat
        }

    def dispatch(
        self, layer: int, hidden_states: torch.Tensor, topk: TopKOutput, *, big: bool
    ) -> DispatchHandle:
        """Post the rows to the expert ranks that need them.

        Args:
            hidden_states: ``[num_tokens, hidden_size]`` model dtype, at most
                ``transport.max_rows`` rows.

        Raises:
            RankDied: one of those ranks is gone.
        """
        num_tokens = hidden_states.shape[0]
        topk_ids = topk.topk_ids.numpy()
        sent = []
        for peer, outstanding in self._outstanding.items():
            rows, ids = self._table.rows_for(peer, topk_ids)
            if not len(rows):
                continue
            index = None if len(rows) == num_tokens else torch.from_numpy(rows)
            sequence = self._transport.post(
                peer,
                layer,
                hidden_states if index is None else hidden_states.index_select(0, index),
                torch.from_numpy(ids),
                topk.topk_weights if index is None else topk.topk_weights.index_select(0, index),
                big=big,
            )
            outstanding.append(sequence)
            sent.append(SentRound(peer, sequence, index))
        own = None
        own_ids = self._table.ids_on(self._transport.seat, topk_ids)
        if own_ids.max() >= 0:
            own = Rows(hidden_states, torch.from_numpy(own_ids), topk.topk_weights)
        return DispatchHandle(num_tokens, own, tuple(sent))

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

    def combine(self, handle: DispatchHandle, partial: torch.Tensor | None) -> torch.Tensor:
        """Add this rank's partial sums and the replies, in seat order.

        Args:
            handle: with at least one sent round, unless ``partial`` is given.
            partial: ``[num_tokens, hidden_size]`` float32 of the own experts, or None; may be
                written to.

        Returns:
            ``[num_tokens, hidden_size]`` float32, new or ``partial`` itself.
        """
        replies = {sent.peer: sent for sent in handle.sent}
        total: torch.Tensor | None = None
        for seat in self._table.expert_seats:
            if seat == self._transport.seat:
                if partial is not None:
                    total = partial if total is None else total.add_(partial)
            elif seat in replies:
                total = self._add_reply(total, replies[seat], handle.num_tokens)
        assert total is not None, "nothing was dispatched"
        return total

    def _add_reply(
        self, total: torch.Tensor | None, sent: SentRound, num_tokens: int
    ) -> torch.Tensor:
        reply = self._transport.poll_reply(sent.peer, sent.sequence)
        assert reply is not None, "combine follows the wait for all replies"
        if total is None:
            if sent.rows is None:
                total = reply.clone()
            else:
                total = reply.new_zeros((num_tokens, reply.shape[1])).index_copy_(
                    0, sent.rows, reply
                )
        elif sent.rows is None:
            total.add_(reply)
        else:
            total.index_add_(0, sent.rows, reply)
        self._transport.release(sent.peer, sent.sequence)
        self._outstanding[sent.peer].popleft()
        return total
