"""Starts ranks, watches them, ends them; the only place that decides who is a member.

The engine gives it specs and hears of three things. Start is one sequence with one deadline:
launch, connect, join, load; any failure is raised and ``stop`` ends everything that was started.
A death is noticed by the closed socket, the launcher's notice or a heartbeat without progress,
whichever comes first.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from coterie import errors
from coterie.errors import PlacementError, RankDied, RankFault, RuntimeFailure
from coterie.runtime.cluster.launcher import Launcher
from coterie.runtime.cluster.rank_connection import RankConnection
from coterie.runtime.cluster.seat import Seat, quietest_expert
from coterie.runtime.config import TimeoutConfig
from coterie.runtime.messages import (
    Failed,
    Heartbeat,
    Join,
    Joined,
    Load,
    Loaded,
    Message,
    Progress,
    QueryStatus,
    RankStatus,
    Serve,
    StepOutput,
    Stop,
)
from coterie.runtime.spec import RankSpec

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total), summed over ranks."""
STATUS_TIMEOUT_S = 2.0
DEATH_NOTICE_S = 0.2
"""How long a launcher's notice of a death may take after its sockets closed."""
QUIET_S = 1.2
"""More than two heartbeat periods: a peer this quiet is the one that a witness calls dead."""
SUSPECT_FACTOR = 2.0
"""Heartbeat silence or standstill, in units of fault_s, after which a rank counts as dead: twice,
so that the ranks' own detection, which knows more, comes first."""
_log = logging.getLogger("coterie.cluster")


class RankEvents(Protocol):
    """What the engine hears of; called on the event loop."""

    def on_step(self, output: StepOutput) -> None: ...

    def on_requests_failed(self, seat: int, request_ids: list[str], error: Exception) -> None: ...

    def on_rank_lost(self, seat: int, error: RuntimeFailure) -> None: ...


class Supervisor:
    """Owner of all ranks of a deployment."""

    def __init__(
        self,
        specs: list[RankSpec],
        launcher: Launcher,
        timeouts: TimeoutConfig,
        versions: dict[str, str],
        progress: ProgressCallback | None = None,
    ) -> None:
        self.epoch = 1
        self.seats = {spec.seat: Seat(spec) for spec in specs}
        self._launcher = launcher
        self._events: RankEvents | None = None
        self._timeouts = timeouts
        self._progress = progress
        self._versions = versions
        self._watch: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._death = asyncio.Event()

    async def start(self) -> None:
        """Launch all ranks, let them meet and load.

        Raises:
            RuntimeFailure, ConfigError: what went wrong; the caller calls ``stop``.

        Blocks: up to ``start_s``.
        """
        end = time.monotonic() + self._timeouts.start_s

        def left() -> float:
            return max(0.1, end - time.monotonic())

        specs = [seat.spec for seat in self.seats.values()]
        self._report("start ranks", 0, len(specs))
        for address in await self._launcher.start(specs, self._on_process_gone, left()):
            self.seats[address.seat].address = address
        await self._connect_all(left)
        self._report("start ranks", len(specs), len(specs))
        members = [seat.address for seat in self.seats.values() if seat.address]
        await self._all(Join(self.epoch, members, left()), Joined, left())
        for loaded in await self._all(Load(left()), Loaded, left()):
            self.seats[loaded.seat].loaded = loaded

    def serve(self, events: RankEvents) -> None:
        """Let ranks enter their step loops; from now on ``events`` hears of everything.

        Raises:
            RuntimeFailure: a rank died since ``start``.
        """
        for seat in self.seats.values():
            if seat.lost is not None:
                raise seat.lost
        self._events = events
        now = time.monotonic()
        for number, seat in self.seats.items():
            self.send(number, Serve(self.epoch))
            seat.heartbeat_at_s = seat.progress_at_s = now
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._timeouts.fault_s / 2, self._check)

    async def _connect_all(self, left: Callable[[], float]) -> None:
        try:
            await asyncio.gather(*(self._connect(seat, left()) for seat in self.seats.values()))
        except RuntimeFailure:
            # If the rank is dead, how it ended says more than a closed connection.
            if lost := await self._deaths():
                raise lost[0] from None
            raise

    async def _deaths(self) -> list[RuntimeFailure]:
        """How ranks ended; the launcher's notice may take a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NOTICE_S):
                await self._death.wait()
        return [seat.lost for seat in self.seats.values() if seat.lost is not None]

    async def _connect(self, seat: Seat, deadline_s: float) -> None:
        if seat.address is None:
            raise PlacementError(f"rank {seat.spec.seat} has no address")

        async def open_link(purpose: str) -> RankConnection:
            assert seat.address is not None
            return await RankConnection.open(
                seat.address,
                token=seat.spec.token,
                purpose=purpose,
                generation=1,
                versions=self._versions,
                on_message=self._on_message,
                on_lost=self._on_link_lost,
                deadline_s=deadline_s,
            )

        seat.engine = await open_link("engine")
        seat.heartbeat_link = await open_link("heartbeat")

    async def _all(self, message: Message, kind: type, deadline_s: float) -> list[Any]:
        """Send to all ranks and wait for one answer of ``kind`` from each."""
        loop = asyncio.get_running_loop()
        futures = {}
        for number, seat in self.seats.items():
            if seat.lost is not None:
                raise seat.lost
            futures[number] = seat.waiter = loop.create_future()
        for number in self.seats:
            self.send(number, message)
        done, pending = await asyncio.wait(
            futures.values(), timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for seat in self.seats.values():
            seat.waiter = None
        failed = [error for future in done if (error := future.exception()) is not None]
        for future in pending:
            future.cancel()
        if failed:
            if all(isinstance(error, RankDied) for error in failed):
                failed = [*await self._deaths(), *failed]
            raise _first_cause(failed)
        if pending:
            late = [number for number, future in futures.items() if future in pending]
            name = type(message).__name__
            raise PlacementError(f"ranks {late} did not answer {name} within {deadline_s:.0f} s")
        answers = [future.result() for future in futures.values()]
        for answer in answers:
            if not isinstance(answer, kind):
                raise RankFault(f"expected {kind.__name__}, got {answer!r}")
        return answers

    def send(self, seat: int, message: Message) -> None:
        """Queue a message to a rank; a lost rank gets nothing."""
        link = self.seats[seat].engine
        if link is not None and self.seats[seat].lost is None:
            link.send(message)

    def alive(self) -> list[int]:
        return [number for number, seat in self.seats.items() if seat.lost is None]

    async def query_status(self) -> dict[int, RankStatus | None]:
        """Fresh status of every live rank, the last one known of others.

        Blocks: up to 2 s when a rank does not answer.
        """
        loop = asyncio.get_running_loop()
        waits = []
        for number in self.alive():
            seat = self.seats[number]
            if seat.waiter is None or seat.waiter.done():
                seat.waiter = loop.create_future()
                self.send(number, QueryStatus())
            waits.append(seat.waiter)
        if waits:
            await asyncio.wait(waits, timeout=STATUS_TIMEOUT_S)
        return {number: seat.status for number, seat in self.seats.items()}

    def _on_message(self, message: Any) -> None:
        if isinstance(message, StepOutput):
            if self._events is not None:
                self._events.on_step(message)
            return
        seat = self.seats.get(message.seat)
        if seat is None:
            return
        if isinstance(message, Heartbeat):
            seat.beat(message, time.monotonic())
        elif isinstance(message, Progress):
            self._on_progress(seat, message)
        elif isinstance(message, Failed):
            self._on_failed(seat, message)
        else:
            if isinstance(message, RankStatus):
                seat.status = message
            if seat.waiter is not None and not seat.waiter.done():
                seat.waiter.set_result(message)

    def _on_progress(self, seat: Seat, message: Progress) -> None:
        seat.progress[message.stage] = (message.done, message.total)
        known = [
            s.progress[message.stage] for s in self.seats.values() if message.stage in s.progress
        ]
        self._report(
            message.stage, sum(done for done, _ in known), sum(total for _, total in known)
        )

    def _report(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(stage, done, total)

    def _on_failed(self, seat: Seat, message: Failed) -> None:
        error = to_error(message)
        if message.request_ids:
            if self._events is not None:
                self._events.on_requests_failed(message.seat, message.request_ids, error)
        elif not isinstance(error, RankDied):
            self._lose(seat, error)
        elif self._events is not None:
            _log.warning("a rank was reported dead by %s", error)
            self._spawn(self._judge(seat, error))
        elif seat.waiter is not None and not seat.waiter.done():
            seat.waiter.set_exception(error)
            seat.waiter.exception()  # may have no reader any more

    async def _judge(self, witness: Seat, error: RuntimeFailure) -> None:
        """A rank waits for a dead expert rank, and has stopped: find which.

        The dead one is silent or stands still; the witness, which can still speak, is blamed only
        if nobody else can be.
        """
        reported_s = time.monotonic()
        while True:
            await asyncio.sleep(DEATH_NOTICE_S)
            if self._stopping or witness.lost is not None:
                return
            if any(s.lost is not None and "experts" in s.spec.roles for s in self.seats.values()):
                return  # settled by better evidence
            now = time.monotonic()
            suspect = quietest_expert(self.seats.values(), witness, now)
            if suspect is not None and suspect.quiet_s(now) > QUIET_S:
                complaint = suspect.complaint(now, self.epoch)
                self._lose(suspect, RankDied(f"{complaint}; reported by {error}"))
                return
            if now - reported_s > SUSPECT_FACTOR * self._timeouts.fault_s:
                self._lose(witness, error)
                return

    def _on_link_lost(self, number: int, reason: str) -> None:
        # The launcher's notice, if it comes at once, says more than "connection closed".
        loop = asyncio.get_running_loop()
        loop.call_later(DEATH_NOTICE_S, self._on_process_gone, number, reason)

    def _on_process_gone(self, number: int, reason: str) -> None:
        """Args:
        reason: one line, and further ones from the rank's log.
        """
        seat = self.seats[number]
        summary, _, log = reason.partition("\n")
        text = f"rank {number} died: {summary} ({seat.where(self.epoch)})"
        # Clients of a running engine need no log; who starts one does.
        self._lose(seat, RankDied(f"{text}\n{log}" if log and self._events is None else text), log)

    def _lose(self, seat: Seat, error: RuntimeFailure, log: str = "") -> None:
        if seat.lost is not None or self._stopping:
            return
        seat.lost = error
        self._death.set()
        number, where = seat.spec.seat, seat.where(self.epoch)
        tail = f"\n{log}" if log and self._events is not None else ""
        _log.error("lost rank %d (%s): %s%s", number, where, error, tail)
        if seat.waiter is not None and not seat.waiter.done():
            seat.waiter.set_exception(error)
            seat.waiter.exception()  # may have no reader any more
        if self._events is None:
            return
        for link in (seat.engine, seat.heartbeat_link):
            if link is not None:
                link.close()
        # Fenced: a rank that is no member must not go on computing.
        self._spawn(self._launcher.kill(seat.spec.seat))
        self._events.on_rank_lost(seat.spec.seat, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check(self) -> None:
        """Evidence from heartbeats: silent or standing still for too long is dead."""
        now, limit = time.monotonic(), SUSPECT_FACTOR * self._timeouts.fault_s
        for number in self.alive():
            seat = self.seats[number]
            if seat.quiet_s(now) > limit:
                self._lose(seat, RankDied(seat.complaint(now, self.epoch)))
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._timeouts.fault_s / 2, self._check)

    async def stop(self, deadline_s: float) -> None:
        """End all ranks: told first, forced at the deadline. Safe to call twice."""
        end = time.monotonic() + deadline_s
        if self._watch is not None:
            self._watch.cancel()
        for number in self.alive():
            self.send(number, Stop(deadline_s))
        self._stopping = True
        try:
            await self._launcher.stop(max(0.0, end - time.monotonic()))
        finally:
            for seat in self.seats.values():
                for link in (seat.engine, seat.heartbeat_link):
                    if link is not None:
                        link.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)


def to_error(message: Failed) -> RuntimeFailure:
    """The exception a rank reported, in this process."""
    where = f"rank {message.seat} (step {message.step}, epoch {message.epoch}): {message.detail}"
    kind = getattr(errors, message.kind, RankFault)
    if isinstance(kind, type) and issubclass(kind, errors.CoterieError):
        return kind(where)  # type: ignore[return-value]
    return RankFault(where)


def _first_cause(found: list[BaseException]) -> BaseException:
    """Of several ranks' errors the one that is not a consequence of another's death."""
    return next((e for e in found if not isinstance(e, RankDied)), found[0])
