"""Rank actors in a Ray cluster: placed together, named, detached, never restarted by Ray.

Used by the keeper. ``Rank`` is a plain class; this file is what makes it an actor.
"""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coterie.errors import PlacementError
from coterie.runtime.messages import SeatAddress
from coterie.runtime.rank.rank import Rank
from coterie.runtime.spec import RankSpec

NODE_SHARE = 0.001
"""Of a node's own resource: pins ranks to the engine's host, whose sockets they share."""
SMALLEST_CPU = 0.01
PROBE_S = 5.0
WAIT_S = 10.0 * 365 * 86400


class RayRanks:
    """The actors and the placement group of one deployment."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._group: Any = None
        self._actors: dict[int, Any] = {}

    def connect(self, address: str) -> None:
        """Join a cluster as driver. Blocks about 1 s.

        Raises:
            PlacementError: there is no cluster at this address that this host belongs to.
        """
        _probe(address)
        try:
            ray.init(
                address=address,
                namespace=f"coterie-{self._deployment}",
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False,
            )
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise PlacementError(f"cannot join the Ray cluster at {address}: {error}") from error

    def start(self, specs: Sequence[RankSpec], deadline_s: float) -> list[SeatAddress]:
        """Place and start one actor per spec. Blocks until all listen.

        Raises:
            PlacementError: not enough room, or a rank failed.
        """
        cpu = _cpu_share(len(specs))
        here = f"node:{ray.util.get_node_ip_address()}"
        self._group = placement_group(
            [{"CPU": cpu, here: NODE_SHARE}] * len(specs),
            name=f"coterie-{self._deployment}",
            lifetime="detached",
        )
        if not self._group.wait(timeout_seconds=deadline_s):
            raise PlacementError(
                f"the Ray cluster cannot place {len(specs)} ranks with {cpu} CPU each on this host"
            )
        actor_class = ray.remote(Rank)
        for index, spec in enumerate(specs):
            self._actors[spec.seat] = actor_class.options(
                name=f"coterie-{self._deployment}-seat-{spec.seat}",
                lifetime="detached",
                num_cpus=cpu,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote(spec)
        calls = [self._actors[spec.seat].start.remote() for spec in specs]
        try:
            return list(ray.get(calls, timeout=deadline_s))
        except RayError as error:
            raise PlacementError(f"a rank actor did not start: {error}") from error

    async def gone(self, seat: int) -> str:
        """Wait until the rank of a seat has ended; says how."""
        try:
            await self._actors[seat].wait.remote(WAIT_S)
        except RayActorError as error:
            return f"actor died: {str(error).splitlines()[0]}"
        except RayError as error:
            return f"actor failed: {error}"
        return "ended"

    def kill(self, seat: int) -> None:
        if seat in self._actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actors[seat])

    def remove(self) -> None:
        """Take actors and placement group out of a cluster that lives on. Blocks shortly."""
        for seat in self._actors:
            self.kill(seat)
        if self._group is not None:
            with contextlib.suppress(RayError, ValueError):
                remove_placement_group(self._group)

    async def all_gone(self, deadline_s: float) -> None:
        waits = [asyncio.ensure_future(self.gone(seat)) for seat in self._actors]
        if waits:
            await asyncio.wait(waits, timeout=max(deadline_s, 0.0))


def _probe(address: str) -> None:
    """Ray itself tries for half a minute before it says that nobody is there."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=PROBE_S).close()
        except OSError as error:
            raise PlacementError(f"no Ray cluster answers at {address}: {error}") from error


def _cpu_share(num_ranks: int) -> float:
    """CPUs of one rank: one, or a fraction where there are fewer free CPUs than ranks."""
    free = ray.available_resources().get("CPU", 0.0)
    if free >= num_ranks:
        return 1.0
    return max(SMALLEST_CPU, int(free / num_ranks * 100) / 100)
