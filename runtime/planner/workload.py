"""What a plan is for: the machines and the requests. Boundary types of the planner."""

from dataclasses import dataclass

from coterie.errors import ConfigError
from coterie.runtime.planner.device import Device

MAX_BATCHED_TOKENS = 2048
"""Rows of one prefill step, as the scheduler's default; sizes workspace and buffers."""
BUFFER_IMBALANCE = 2.0
"""Buffers hold this multiple of what an expert rank receives when experts are used evenly."""
TIME_IMBALANCE = 0.2
"""The busiest of many expert ranks has so much more than the average; see ``busiest``."""


def busiest(ranks: int) -> float:
    """Work of the busiest of ``ranks`` expert ranks, as a multiple of the average."""
    return 1 + TIME_IMBALANCE * (1 - 1 / ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes of equal devices."""

    device: Device
    devices_per_node: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise ConfigError("--devices and --nodes must be at least 1")

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.nodes

    @property
    def domain(self) -> int:
        """Devices that reach each other over the fast link."""
        return min(self.device.link_domain, self.devices_per_node)

    def crosses(self, group: int, world: int) -> bool:
        """Whether some group of consecutive ranks has to use the network."""
        return group > self.domain or (world > self.domain and self.domain % group != 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests to plan for, and how memory is shared out."""

    context: int
    """Tokens of one request, prompt and answer together."""
    concurrency: int
    """Requests that run at once."""
    memory_utilization: float = 0.9
    reserve_bytes: int
    """Stands for workspace, graphs and what else a rank holds beside weights and KV."""
    num_parameters: int | None = None
    """Overrules the count from the config; a dense model is then split evenly."""
    slo_ttft_s: float | None = None
    slo_tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (
            ("--context", self.context),
            ("--concurrency", self.concurrency),
            ("--num-parameters", self.num_parameters),
            ("--slo-ttft", self.slo_ttft_s),
            ("--slo-tpot", self.slo_tpot_ms),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{flag} must be positive, got {value}")
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"--memory-utilization must be above 0 and at most 1, got {self.memory_utilization}"
            )
        if self.reserve_bytes < 0:
            raise ConfigError("--reserve-gib must not be negative")

    def tokens_per_replica(self, dp: int) -> int:
        """Decoding tokens of the fullest replica in one step."""
        return -(-self.concurrency // dp)
