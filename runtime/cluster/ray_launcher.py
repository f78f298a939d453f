"""Ranks as Ray actors, through a keeper process that outlives the engine (see keeper)."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from coterie.errors import PlacementError
from coterie.runtime.cluster.keeper_messages import (
    KeeperMessage,
    KillRank,
    RankGone,
    Started,
    StartRanks,
    StopAll,
    to_engine,
    to_line,
)
from coterie.runtime.cluster.launcher import DeathNotice
from coterie.runtime.cluster.rank_log import tail
from coterie.runtime.cluster.ray_head import kill_session
from coterie.runtime.messages import SeatAddress
from coterie.runtime.spec import RankSpec

MARGIN_S = 5.0
"""What the keeper may take beyond the ranks' own deadline to end its Ray head."""
KILL_S = 10.0


class RayLauncher:
    """Launcher over a keeper; one per deployment.

    Args:
        ray_address: an existing cluster, or None for an own head.
    """

    def __init__(self, ray_address: str | None, orphan_grace_s: float) -> None:
        self._ray_address = ray_address
        self._orphan_grace_s = orphan_grace_s
        self._keeper: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._answer: asyncio.Future[list[SeatAddress]] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._on_death: DeathNotice | None = None

    async def start(
        self, specs: Sequence[RankSpec], on_death: DeathNotice, deadline_s: float
    ) -> list[SeatAddress]:
        self._on_death = on_death
        folder = Path(specs[0].runtime_dir)
        self._log = folder / "keeper.log"
        with open(self._log, "wb") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "coterie.runtime.cluster.keeper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        lines = asyncio.StreamReader(limit=64 << 20)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), self._keeper.stdout
        )
        self._reading = asyncio.create_task(self._read(lines))
        order = StartRanks(
            deployment=specs[0].deployment,
            runtime_dir=str(folder),
            ray_address=self._ray_address,
            specs=list(specs),
            orphan_grace_s=self._orphan_grace_s,
            deadline_s=deadline_s,
        )
        await asyncio.to_thread(self._send, order)
        try:
            async with asyncio.timeout(deadline_s + MARGIN_S):
                return await self._answer
        except TimeoutError:
            raise PlacementError(f"Ray did not start ranks within {deadline_s:.0f} s") from None

    async def _read(self, lines: asyncio.StreamReader) -> None:
        assert self._answer is not None
        assert self._on_death is not None
        while line := await lines.readline():
            message = to_engine(line)
            if isinstance(message, RankGone):
                self._on_death(message.seat, message.reason)
            elif self._answer.done():
                continue
            elif isinstance(message, Started):
                self._answer.set_result(message.addresses)
            else:
                self._answer.set_exception(PlacementError(message.detail))
        if not self._answer.done():
            text = tail(self._log) if self._log else ""
            self._answer.set_exception(PlacementError(f"the keeper of Ray ended{text}"))

    def _send(self, message: KeeperMessage) -> None:
        if self._keeper is None or self._keeper.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._keeper.stdin.write(to_line(message))
            self._keeper.stdin.flush()

    async def kill(self, seat: int) -> None:
        self._send(KillRank(seat=seat))

    async def stop(self, deadline_s: float) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        self._send(StopAll(deadline_s=max(deadline_s, 0.0)))
        await _wait(keeper, max(deadline_s, 0.0) + MARGIN_S)
        if keeper.returncode != 0:  # it hangs, or was killed and left its work to others
            # Its own head is in its session; in a cluster of others this is the keeper alone.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_S):
                    while kill_session(keeper.pid):
                        await asyncio.sleep(0.02)
            await _wait(keeper, KILL_S)
        if keeper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
        if self._reading is not None:
            await self._reading
        if self._answer is not None and not self._answer.cancelled():
            self._answer.exception()  # of a start that was cancelled: nobody else looks at it


async def _wait(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """``Popen.wait`` without a thread: there are none any more when the interpreter ends."""
    if process.poll() is not None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.poll()
