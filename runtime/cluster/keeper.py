"""``python -m coterie.runtime.cluster.keeper``: owns a deployment's part of Ray.

Started by the Ray launcher in a session of its own. Starts the own Ray head (or joins the cluster
of ``--ray-address``), places the rank actors, passes on death notices. When the engine tells it
to, or after the orphan grace when the engine is gone, it ends what it started: the own head with
everything in its session, or only its actors in a cluster that belongs to others. The engine
process itself never imports ray.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import PlacementError, ProtocolError
from coterie.runtime.cluster import runtime_dir
from coterie.runtime.cluster.keeper_messages import (
    KeeperMessage,
    KillRank,
    RankGone,
    Started,
    StartFailed,
    StartRanks,
    StopAll,
    to_keeper,
    to_line,
)
from coterie.runtime.cluster.rank_log import actor_tail
from coterie.runtime.cluster.ray_head import LOOPBACK, RayHead, authentication, end_session
from coterie.runtime.messages import SeatAddress
from coterie.runtime.rank.hold import hold

if TYPE_CHECKING:
    from coterie.runtime.cluster.ray_ranks import RayRanks


class Keeper:
    """Everything this process owns, and the pipe to the engine."""

    def __init__(self, order: StartRanks, reply_fd: int) -> None:
        self._order = order
        self._reply_fd = reply_fd
        self._folder = Path(order.runtime_dir)
        hold(self._folder)
        self._ranks: RayRanks | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, lines: asyncio.StreamReader) -> None:
        """Start, then obey until told to stop or orphaned."""
        starting = asyncio.create_task(self._start())
        self._tasks.add(starting)
        while line := await lines.readline():
            message = to_keeper(line)
            if isinstance(message, KillRank) and self._ranks is not None:
                await asyncio.to_thread(self._ranks.kill, message.seat)
            if isinstance(message, StopAll):
                if self._ranks is not None:
                    await self._ranks.all_gone(message.deadline_s)
                return
        if starting.done():  # a new engine may come back for ranks that serve, for none else
            await asyncio.sleep(self._order.orphan_grace_s)

    async def _start(self) -> None:
        order = self._order
        try:
            async with asyncio.timeout(order.deadline_s):
                addresses = await asyncio.to_thread(self._start_blocking)
        except TimeoutError:
            where = f"Ray at {order.ray_address}" if order.ray_address else "the own Ray head"
            detail = f"{where} did not start {len(order.specs)} ranks in {order.deadline_s:.0f} s"
            self._send(StartFailed(detail=detail))
            return
        except Exception as error:  # whatever it is, the engine must hear of it
            log = actor_tail(self._folder / "ray") if self._ranks is not None else ""
            self._send(StartFailed(detail=f"{str(error) or repr(error)}{log}"))
            return
        for address in addresses:
            self._watch(self._report_gone(address.seat, address.pid))
        self._send(Started(addresses=addresses))

    def _start_blocking(self) -> list[SeatAddress]:
        order = self._order
        address, head = order.ray_address, None
        if address is None:
            os.environ.update(LOOPBACK | authentication(self._folder))
            head = RayHead(self._folder / "ray", num_cpus=len(order.specs))
            head.start()
        # Only now, with Ray's environment set; it takes most of a second, which the head takes too.
        from coterie.runtime.cluster.ray_ranks import RayRanks

        if head is not None:
            address = head.address()
            threading.Thread(target=head.wait, daemon=True).start()
        assert address is not None
        self._ranks = RayRanks(order.deployment)
        self._ranks.connect(address)
        return self._ranks.start(order.specs, order.deadline_s)

    async def _report_gone(self, seat: int, pid: int) -> None:
        assert self._ranks is not None
        reason = await self._ranks.gone(seat)
        log = actor_tail(self._folder / "ray", pid)
        self._send(RankGone(seat=seat, reason=f"{reason}{log}"))

    def _watch(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    def _send(self, message: KeeperMessage) -> None:
        try:
            os.write(self._reply_fd, to_line(message))
        except BrokenPipeError:
            return  # the engine is gone; the other pipe says so too

    def end(self) -> None:
        """End all that is ours. Blocks shortly; the caller exits afterwards."""
        if self._order.ray_address is None:
            end_session(os.getsid(0), spare=os.getpid())
        elif self._ranks is not None:
            self._ranks.remove()
        runtime_dir.remove(self._folder)


async def _main(reply_fd: int) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=64 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    order = to_keeper(await lines.readline())
    if not isinstance(order, StartRanks):
        raise ProtocolError(f"the first message to a keeper is its order, not {order!r}")
    keeper = Keeper(order, reply_fd)
    work = asyncio.create_task(keeper.run(lines))
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    try:
        await asyncio.wait([work])
    finally:
        keeper.end()
        os._exit(0)  # threads that wait for Ray must not keep this process


def main() -> None:
    if os.getsid(0) != os.getpid():
        raise PlacementError("the keeper must lead a session of its own")
    reply_fd = os.dup(1)
    os.dup2(2, 1)  # what Ray prints must not mix with the replies
    asyncio.run(_main(reply_fd))


if __name__ == "__main__":
    main()
