"""What launches ranks: the protocol that Ray and plain processes both implement.

A launcher creates processes, says where they listen, tells about deaths and ends them. It knows
nothing of epochs, weights or requests; the supervisor does.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from coterie.runtime.messages import SeatAddress
from coterie.runtime.spec import RankSpec

DeathNotice = Callable[[int, str], None]
"""Called on the event loop with (seat, reason) when a rank's process is gone. The reason is one
line; further lines are the end of the rank's log."""


class Launcher(Protocol):
    async def start(
        self, specs: Sequence[RankSpec], on_death: DeathNotice, deadline_s: float
    ) -> list[SeatAddress]:
        """Start one rank per spec.

        Returns:
            Where each listens, in the order of ``specs``.

        Raises:
            PlacementError: a rank did not start; those that did are left for ``stop``.
        """
        ...

    async def kill(self, seat: int) -> None:
        """End one rank at once. A rank that is gone is fine."""
        ...

    async def stop(self, deadline_s: float) -> None:
        """Give ranks that were told to stop until the deadline, then end what is left of them."""
        ...
