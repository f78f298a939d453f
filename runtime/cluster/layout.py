"""Which seats a deployment has, and what each does.

Pure: turns the user's ``ParallelConfig`` and the model's shape into a ``Layout``, or refuses with
the sentence that says what to change. Called before anything is started.
"""

import hashlib
from dataclasses import dataclass

import msgspec

from coterie.attention.models.config import ModelConfig
from coterie.errors import ConfigError
from coterie.experts.placement import ExpertPlacement
from coterie.runtime.config import ParallelConfig

MAX_DEFAULT_RANKS = 2
"""Ranks that are started when nobody asks for a number, however many cores there are: every rank
holds a copy of the attention weights and one compute thread."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Seats and roles. Seats are never renumbered."""

    attention_seats: tuple[int, ...]
    expert_seats: tuple[int, ...]
    """Empty for a dense model."""
    placement: ExpertPlacement | None
    """None for a dense model."""
    colocated: bool
    """Every expert seat is an attention seat too."""

    @property
    def seats(self) -> tuple[int, ...]:
        return tuple(sorted({*self.attention_seats, *self.expert_seats}))

    def roles(self, seat: int) -> tuple[str, ...]:
        """Duties of one seat, of "attention" and "experts"."""
        attention = ("attention",) if seat in self.attention_seats else ()
        experts = ("experts",) if seat in self.expert_seats else ()
        return attention + experts

    def hash(self) -> str:
        """Equal on ranks that agree on seats and placement; part of every handshake."""
        placement = self.placement
        parts = (
            self.attention_seats,
            self.expert_seats,
            placement and (placement.physical_to_logical, placement.physical_to_seat),
        )
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]

    def describe(self) -> dict[str, object]:
        """The ``layout`` object of ``/status``."""
        placement = self.placement
        return {
            "attention_ranks": len(self.attention_seats),
            "expert_ranks": len(self.expert_seats),
            "colocated": self.colocated,
            "attention_seats": list(self.attention_seats),
            "expert_seats": list(self.expert_seats),
            "num_logical_experts": placement.num_logical if placement else 0,
            "num_physical_experts": placement.num_physical if placement else 0,
        }


def resolve_layout(parallel: ParallelConfig, model: ModelConfig, num_cpus: int) -> Layout:
    """Decide every "auto" of the layout.

    Args:
        num_cpus: cores the ranks may use; one compute thread each.

    Raises:
        ConfigError: the flags contradict each other or do not fit the model.
    """
    _refuse_unbuilt(parallel)
    if model.moe is None:
        return _dense_layout(parallel, num_cpus)
    return _moe_layout(parallel, model.moe.num_experts, num_cpus)


def _refuse_unbuilt(parallel: ParallelConfig) -> None:
    for flag, value in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
    ):
        if value != 1:
            raise ConfigError(
                f"{flag} {value} is not available in this version, only 1: spread the model with "
                "--data-parallel-size, or --attention-ranks and --expert-ranks"
            )
    for flag, count in (
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--attention-ranks", parallel.attention_ranks),
        ("--expert-ranks", parallel.expert_ranks),
    ):
        if count is not None and count < 1:
            raise ConfigError(f"{flag} must be at least 1, got {count}")
    if parallel.num_redundant_experts < 0:
        raise ConfigError(
            f"--num-redundant-experts must not be negative, got {parallel.num_redundant_experts}"
        )


def _attention_ranks(parallel: ParallelConfig) -> int | None:
    dp, attention = parallel.data_parallel_size, parallel.attention_ranks
    if dp is not None and attention is not None and dp != attention:
        raise ConfigError(
            f"--data-parallel-size {dp} and --attention-ranks {attention} contradict each other: "
            "give one of them"
        )
    return attention if attention is not None else dp


def _dense_layout(parallel: ParallelConfig, num_cpus: int) -> Layout:
    for flag, given in (
        ("--expert-ranks", parallel.expert_ranks is not None),
        ("--disaggregate", parallel.disaggregate),
        ("--num-redundant-experts", parallel.num_redundant_experts > 0),
    ):
        if given:
            raise ConfigError(f"{flag} needs a mixture-of-experts model; this model is dense")
    count = _attention_ranks(parallel) or max(1, min(num_cpus, MAX_DEFAULT_RANKS))
    return Layout(
        attention_seats=tuple(range(count)), expert_seats=(), placement=None, colocated=True
    )


def _moe_layout(parallel: ParallelConfig, num_experts: int, num_cpus: int) -> Layout:
    attention, experts = _attention_ranks(parallel), parallel.expert_ranks
    if attention is None and experts is None:
        attention = max(1, min(num_cpus, num_experts, MAX_DEFAULT_RANKS))
    attention = attention if attention is not None else experts
    experts = experts if experts is not None else attention
    assert attention is not None
    assert experts is not None
    colocated = attention == experts and not parallel.disaggregate
    attention_seats = tuple(range(attention))
    expert_seats = attention_seats if colocated else tuple(range(attention, attention + experts))
    return Layout(
        attention_seats=attention_seats,
        expert_seats=expert_seats,
        placement=ExpertPlacement.contiguous(
            num_experts, expert_seats, parallel.num_redundant_experts
        ),
        colocated=colocated,
    )
