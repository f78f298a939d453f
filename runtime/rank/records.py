"""The full record of every request bound to this rank, kept until the engine acknowledges its end.

Together with the engine's journal of what is still waiting, the records outlive the engine.
Written by the step loop at commit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from coterie.runtime.messages import Assign, TokenOutput


@dataclass(slots=True)
class Record:
    """One request: how it came, every committed token since, and its end."""

    assign: Assign
    token_ids: list[int] = field(default_factory=list)
    """Committed here, after ``assign.output_token_ids``."""
    finish_reason: str | None = None
    stop_token_id: int | None = None


class Records:
    """Records by request id."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def get(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    def add(self, assign: Assign) -> None:
        self._records[assign.request_id] = Record(assign)

    def append(self, output: TokenOutput) -> None:
        """Add the committed tokens of one step."""
        record = self._records[output.request_id]
        record.token_ids += output.token_ids
        record.finish_reason = output.finish_reason
        record.stop_token_id = output.stop_token_id

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop records that are acknowledged or aborted; unknown ids are ignored."""
        for request_id in request_ids:
            self._records.pop(request_id, None)
