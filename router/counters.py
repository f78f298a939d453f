"""What a rank's router counts; cumulative, read as a dict for metrics.

Names ending in ``_s`` are seconds, the rest are counts. One thread writes.
"""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class RouterCounters:
    steps: int = 0
    decode_steps: int = 0
    big_steps: int = 0
    step_s: float = 0.0
    """Inside decode steps, begin to end."""
    big_step_s: float = 0.0
    exchange_s: float = 0.0
    """Decode steps: gate done to combine done, less the time this rank ran expert kernels."""
    big_exchange_s: float = 0.0
    """The same for big steps."""
    kernel_s: float = 0.0
    """In expert kernels, whoever's rows."""
    expert_passes: int = 0
    """Passes over one layer's local experts: merged, lone, or a finished job."""
    merged_passes: int = 0
    """Passes over the rows of two or more attention ranks."""
    lone_passes: int = 0
    """Passes over the rows of one attention rank."""
    served_rounds: int = 0
    """Rounds of other ranks answered, jobs included."""
    job_pieces: int = 0
    gather_wait_s: float = 0.0
    gather_timeouts: int = 0
    align_wait_s: float = 0.0
    aligns: int = 0
    sleeps: int = 0
    """Timed blocks of any wait."""
    stale_messages: int = 0

    def as_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}
