"""What commands show: progress on stderr, and a stdout that carries results alone."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


class StartProgress:
    """Progress of fetching and loading: bars on a terminal, one line a finished stage elsewhere.

    Call it as ``progress(stage, done, total)``, from any thread.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._console.is_terminal:
            if done >= total and stage not in self._said:
                self._said.add(stage)
                print(f"{stage}: {done}/{total}", file=sys.stderr, flush=True)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)


@contextlib.contextmanager
def clean_stdout() -> Iterator[IO[str]]:
    """A private stdout. Meanwhile file descriptor 1 is stderr, for this process and its children.

    Libraries and rank processes print where they like; results must not be mixed with that.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(saved), "w", encoding="utf-8") as results:
            yield results
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def table_console() -> Console:
    """For tables on stdout: as wide as the terminal, or wide enough for any table in a file."""
    return Console() if sys.stdout.isatty() else Console(width=160)
