"""Ranks as plain processes of this host, in sessions of their own.

For tests, offline use and machines without Ray. The spec, which carries the deployment's secret,
goes through stdin; the address comes back on stdout; stderr goes to a log in the runtime folder.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coterie.errors import PlacementError
from coterie.runtime.cluster.launcher import DeathNotice
from coterie.runtime.cluster.rank_log import tail
from coterie.runtime.messages import SeatAddress
from coterie.runtime.spec import RankSpec

RANK_MODULE = "coterie.runtime.rank.main"


class ProcessLauncher:
    """Launcher over ``python -m coterie.runtime.rank.main``."""

    def __init__(self, module: str = RANK_MODULE) -> None:
        self._module = module
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exited: dict[int, asyncio.Event] = {}
        self._logs: dict[int, Path] = {}
        self._on_death: DeathNotice | None = None

    async def start(
        self, specs: Sequence[RankSpec], on_death: DeathNotice, deadline_s: float
    ) -> list[SeatAddress]:
        self._on_death = on_death
        for spec in specs:
            self._spawn(spec)
        reads = [asyncio.create_task(self._read_address(spec)) for spec in specs]
        try:
            async with asyncio.timeout(deadline_s):
                return list(await asyncio.gather(*reads))
        except TimeoutError:
            raise PlacementError(f"ranks did not start within {deadline_s:.0f} s") from None
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    def _spawn(self, spec: RankSpec) -> None:
        log = Path(spec.runtime_dir) / f"seat-{spec.seat}.log"
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._processes[spec.seat] = process
        self._logs[spec.seat] = log
        self._exited[spec.seat] = asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._reap, loop, spec.seat, pidfd)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.json.encode(spec))

    def _reap(self, loop: asyncio.AbstractEventLoop, seat: int, pidfd: int) -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        code = self._processes[seat].wait()
        self._exited[seat].set()
        if self._on_death is not None:
            self._on_death(seat, f"process ended with {_exit_name(code)}{tail(self._logs[seat])}")

    async def _read_address(self, spec: RankSpec) -> SeatAddress:
        """Until the rank wrote its address or its pipe closed."""
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), self._processes[spec.seat].stdout
        )
        try:
            line = await lines.readline()
        finally:
            pipe.close()
        if not line:
            raise PlacementError(f"rank {spec.seat} did not start{tail(self._logs[spec.seat])}")
        return msgspec.json.decode(line, type=SeatAddress)

    async def kill(self, seat: int) -> None:
        process = self._processes.get(seat)
        if process is not None and not self._exited[seat].is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    async def stop(self, deadline_s: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in self._exited.values()]
        if waits:
            await asyncio.wait(waits, timeout=max(deadline_s, 0.0))
        for seat in self._processes:
            await self.kill(seat)
        if waits:  # killed processes are reaped at once
            await asyncio.wait(waits, timeout=5.0)
        for process in self._processes.values():
            if process.stdout is not None:  # of a start that was cancelled before it read
                process.stdout.close()


def _exit_name(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
