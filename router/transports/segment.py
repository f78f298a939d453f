"""Layout of the shared-memory files: one board per seat, one segment per ordered pair of seats.

    board    (written by its seat only)   state word | sleeping flag
    segment  (attention seat -> expert seat)
             request word | reply word | slot headers | hidden_states | weights | ids | replies

Control words are int64, each in a cache line of its own. Arrays start on page borders, so pages
of slots that are never filled cost nothing. Files are memfds: no name, nothing to clean up.
"""

import fcntl
import mmap
import os
from dataclasses import dataclass

import torch

from coterie.errors import HandshakeError
from coterie.experts.rows import RowBuffer
from coterie.router.transports.base import RoundShape

PAGE = 4096
LINE_WORDS = 8
"""int64 words per cache line."""

# Board lines.
STATE = 0 * LINE_WORDS
SLEEPING = 1 * LINE_WORDS
BOARD_BYTES = PAGE

# Segment lines; slot headers follow from line HEADERS on, one line each.
REQUEST = 0 * LINE_WORDS
"""Sequence number of the newest posted round; written by the source."""
REPLY = 1 * LINE_WORDS
"""Sequence number of the newest answered round; written by the destination."""
HEADERS = 2
# Words of a slot header.
EPOCH, SOURCE, LAYER, SEQUENCE, NUM_TOKENS, BIG, KIND = range(7)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets of the arrays of a segment."""

    hidden_states: int
    topk_weights: int
    topk_ids: int
    replies: int
    total_bytes: int

    @staticmethod
    def of(shape: RoundShape) -> "SegmentLayout":
        rows = shape.num_slots * shape.max_rows
        hidden = _pages(8 * LINE_WORDS * (HEADERS + shape.num_slots))
        weights = hidden + _pages(rows * shape.hidden_size * shape.dtype.itemsize)
        ids = weights + _pages(rows * shape.top_k * 4)
        replies = ids + _pages(rows * shape.top_k * 4)
        total = replies + _pages(rows * shape.hidden_size * 4)
        return SegmentLayout(hidden, weights, ids, replies, total)


def header_word(sequence: int, num_slots: int) -> int:
    """Index of the first header word of the slot that carries round ``sequence``."""
    return (HEADERS + (sequence - 1) % num_slots) * LINE_WORDS


def create_file(label: str, num_bytes: int) -> int:
    """A memfd of that size which nobody can shrink under a mapping; returns its descriptor."""
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def map_words(fd: int, num_bytes: int, *, writable: bool = True) -> tuple[mmap.mmap, memoryview]:
    """Map a file shared; returns the mapping and its int64 words.

    Raises:
        HandshakeError: the file has another size than agreed.
    """
    actual = os.fstat(fd).st_size
    if actual != num_bytes:
        raise HandshakeError(f"shared segment has {actual} bytes, expected {num_bytes}")
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=prot)
    return mapping, memoryview(mapping).cast("q")


class Segment:
    """The slots of one end of an ordered pair. The descriptor stays owned by the caller."""

    CACHED_ROWS = 64
    """Views of replies up to this many rows are kept: making them costs more than the rows."""

    def __init__(self, fd: int, shape: RoundShape) -> None:
        layout = SegmentLayout.of(shape)
        mapping, self.words = map_words(fd, layout.total_bytes)
        slots, rows, hidden, top_k = shape.num_slots, shape.max_rows, shape.hidden_size, shape.top_k

        def view(offset: int, dtype: torch.dtype, width: int) -> torch.Tensor:
            flat = torch.frombuffer(mapping, dtype=dtype, count=slots * rows * width, offset=offset)
            return flat.view(slots, rows, width)

        # The views keep the mapping alive.
        self._slots: list[RowBuffer] = [
            RowBuffer(*tensors)
            for tensors in zip(
                view(layout.hidden_states, shape.dtype, hidden),
                view(layout.topk_ids, torch.int32, top_k),
                view(layout.topk_weights, torch.float32, top_k),
                view(layout.replies, torch.float32, hidden),
                strict=True,
            )
        ]
        self._replies: dict[tuple[int, int], torch.Tensor] = {}
        self.num_slots = slots

    def slot(self, sequence: int) -> RowBuffer:
        """The slot that carries round ``sequence``; ``out`` is the place of its reply."""
        return self._slots[(sequence - 1) % self.num_slots]

    def reply(self, sequence: int, num_tokens: int) -> torch.Tensor:
        """The first ``num_tokens`` rows of the reply to round ``sequence``."""
        key = ((sequence - 1) % self.num_slots, num_tokens)
        view = self._replies.get(key)
        if view is None:
            view = self._slots[key[0]].out[:num_tokens]
            if num_tokens <= self.CACHED_ROWS:
                self._replies[key] = view
        return view

    def close(self) -> None:
        """Drop the views; the mapping goes with the last of them."""
        self._slots.clear()
        self._replies.clear()
        self.words.release()
