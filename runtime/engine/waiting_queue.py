"""The one waiting queue: first in, first out, with bounded overtaking.

A choice that no rank has room for may be overtaken by smaller ones, but only a bounded number of
times: then it blocks the queue until it is bound. So nothing starves.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from coterie.errors import QueueFull
from coterie.runtime.engine.choice import Choice

MAX_OVERTAKEN = 32
SCAN_DEPTH = 64
"""Choices looked at behind a blocked head; bounds the work per step."""


class WaitingQueue:
    """Choices that are bound to no rank.

    Args:
        limit: most choices that wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._choices: OrderedDict[str, Choice] = OrderedDict()

    def __len__(self) -> int:
        return len(self._choices)

    def check_room(self, count: int, retry_after_s: float) -> None:
        """Refuse what does not fit.

        Raises:
            QueueFull: with ``retry_after_s``.
        """
        if len(self._choices) + count > self._limit:
            raise QueueFull(
                f"{len(self._choices)} requests wait, the limit is {self._limit}: retry later",
                retry_after_s=retry_after_s,
            )

    def push(self, choice: Choice) -> None:
        self._choices[choice.choice_id] = choice

    def push_front(self, choice: Choice) -> None:
        """Put back a choice that was bound before: it waits first."""
        self._choices[choice.choice_id] = choice
        self._choices.move_to_end(choice.choice_id, last=False)

    def remove(self, choice_id: str) -> None:
        """Drop a choice; one that does not wait is fine."""
        self._choices.pop(choice_id, None)

    def candidates(self) -> Iterator[Choice]:
        """Choices that may be bound now, oldest first. The caller removes those it binds, and
        calls ``overtaken`` for those it found no room for."""
        for choice in list(islice(self._choices.values(), SCAN_DEPTH)):
            yield choice
            if choice.choice_id in self._choices and choice.num_skipped >= MAX_OVERTAKEN:
                return

    def overtaken(self, blocked: list[Choice]) -> None:
        """One choice was bound before each of these."""
        for choice in blocked:
            choice.num_skipped += 1
