"""Where experts live: logical -> physical expert -> seat, with replicas.

One placement serves all MoE layers of a model. Pure data: no I/O, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coterie.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Immutable map of physical experts.

    Attributes:
        num_logical: logical experts per layer.
        physical_to_logical: ``[num_physical]``.
        physical_to_seat: ``[num_physical]``, seat that holds each physical expert.

    Raises:
        ConfigError: an expert is nowhere, or twice on one seat.
    """

    num_logical: int
    physical_to_logical: tuple[int, ...]
    physical_to_seat: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.physical_to_logical) != len(self.physical_to_seat):
            raise ConfigError("physical_to_logical and physical_to_seat differ in length")
        missing = set(range(self.num_logical)) - set(self.physical_to_logical)
        if missing:
            raise ConfigError(f"experts {sorted(missing)} are placed on no seat")
        pairs = list(zip(self.physical_to_logical, self.physical_to_seat, strict=True))
        if len(set(pairs)) != len(pairs):
            raise ConfigError("two replicas of one expert on the same seat")

    @staticmethod
    def contiguous(
        num_logical: int, seats: Sequence[int], num_redundant: int = 0
    ) -> "ExpertPlacement":
        """Deal experts out in contiguous, nearly equal runs; then replicas round robin.

        Args:
            num_logical: logical experts per layer; need not divide by ``len(seats)``.
            seats: expert seats, at most ``num_logical`` of them.
            num_redundant: extra copies in total.

        Raises:
            ConfigError: more seats than experts, or more copies than distinct seats allow.
        """
        count = len(seats)
        if not 1 <= count <= num_logical:
            raise ConfigError(
                f"{count} expert ranks for {num_logical} experts: "
                f"use 1 to {num_logical} expert ranks"
            )
        if num_redundant > num_logical * (count - 1):
            raise ConfigError(
                f"{num_redundant} redundant experts do not fit: {count} expert ranks allow at most "
                f"{num_logical * (count - 1)} without two copies on one rank"
            )
        logical = list(range(num_logical))
        place = [i * count // num_logical for i in range(num_logical)]
        held = [{e for e in logical if place[e] == index} for index in range(count)]
        for extra in range(num_redundant):
            expert = extra % num_logical
            free = [index for index in range(count) if expert not in held[index]]
            index = min(free, key=lambda i: (len(held[i]), i))
            held[index].add(expert)
            logical.append(expert)
            place.append(index)
        return ExpertPlacement(
            num_logical=num_logical,
            physical_to_logical=tuple(logical),
            physical_to_seat=tuple(seats[index] for index in place),
        )

    @property
    def num_physical(self) -> int:
        return len(self.physical_to_logical)

    @property
    def seats(self) -> tuple[int, ...]:
        """Seats that hold at least one expert, ascending."""
        return tuple(sorted(set(self.physical_to_seat)))

    def physical_on(self, seat: int) -> tuple[int, ...]:
        """Physical experts of one seat, ascending; their index here is the local expert id."""
        return tuple(p for p, s in enumerate(self.physical_to_seat) if s == seat)

    def replicas(self, logical: int) -> tuple[int, ...]:
        """Physical copies of a logical expert, ascending."""
        return tuple(p for p, l in enumerate(self.physical_to_logical) if l == logical)

    def logical_to_physical(self, home_seat: int) -> np.ndarray:
        """The replica each home seat uses: its own if it has one, else spread by home seat.

        A function of the placement and the home seat only, so that a token's sum never depends on
        other tokens.

        Returns:
            ``[num_logical]`` int32 physical expert per logical expert.
        """
        chosen = np.empty(self.num_logical, dtype=np.int32)
        for logical in range(self.num_logical):
            copies = self.replicas(logical)
            local = [p for p in copies if self.physical_to_seat[p] == home_seat]
            chosen[logical] = local[0] if local else copies[home_seat % len(copies)]
        return chosen

    @cached_property
    def physical_seats(self) -> np.ndarray:
        """``[num_physical]`` int32, seat per physical expert."""
        return np.asarray(self.physical_to_seat, dtype=np.int32)
