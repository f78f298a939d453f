"""Devices the planner knows, and how one is described in a YAML file.

Figures are the vendors' peaks (one direction for links), so what follows from them is a bound, not
a promise; those of ``cpu`` were measured on a
server core with AVX-512, with the kernels of this project. Called by the command line.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from coterie.errors import ConfigError

GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or one CPU core with its share of the memory."""

    name: str
    memory_bytes: int
    bandwidth: float
    """Of its memory, bytes per second."""
    flops: Mapping[str, float] = field(hash=False)
    """Dense matrix FLOPs per second by what weights are stored in; others count as bfloat16."""
    link_domain: int = 8
    """Devices that reach each other over the fast link (NVLink, or shared memory)."""
    link_bandwidth: float = 450e9
    """Of one device in one direction inside the domain, bytes per second."""
    link_latency_s: float = 1.5e-6
    """Of one hop of a message."""
    network_bandwidth: float = 50e9
    """Of one device between domains, bytes per second."""
    network_latency_s: float = 6e-6
    reserve_bytes: int = 4 * GIB
    """Default of --reserve-gib."""
    graphs_bytes: int = 1 * GIB
    """Captured graphs; part of the reserve."""
    combine_bytes: int = 2
    """Of one element of an expert rank's reply."""
    overlaps: bool = True
    """Reads memory while it computes; a CPU core's kernels do one after the other."""
    kind: Literal["gpu", "cpu"] = "gpu"

    def part_s(self, read_s: float, compute_s: float) -> float:
        """Time of a part of a step from those of its bytes and its FLOPs."""
        return max(read_s, compute_s) if self.overlaps else read_s + compute_s

    def flops_for(self, weights_dtype: str) -> float:
        """Rate of matrix products with weights stored like this."""
        return self.flops.get(weights_dtype, self.flops["bfloat16"])


_FLOAT4: Final = ("nvfp4", "float4")

PRESETS: Final[Mapping[str, Device]] = {
    "a100": Device(
        name="a100",
        memory_bytes=80 * 10**9,
        bandwidth=2.039e12,
        flops={"bfloat16": 312e12, "float32": 156e12},
        link_bandwidth=300e9,
        network_bandwidth=25e9,
    ),
    "h100": Device(
        name="h100",
        memory_bytes=80 * 10**9,
        bandwidth=3.35e12,
        flops={"bfloat16": 989e12, "float8": 1979e12, "float32": 494e12},
    ),
    "h200": Device(
        name="h200",
        memory_bytes=141 * 10**9,
        bandwidth=4.8e12,
        flops={"bfloat16": 989e12, "float8": 1979e12, "float32": 494e12},
    ),
    "b200": Device(
        name="b200",
        memory_bytes=180 * 10**9,
        bandwidth=8e12,
        flops={"bfloat16": 2250e12, "float8": 4500e12, "float32": 1100e12}
        | dict.fromkeys(_FLOAT4, 9000e12),
        link_bandwidth=900e9,
    ),
    "cpu": Device(
        name="cpu",
        memory_bytes=0,
        bandwidth=12e9,
        flops={"bfloat16": 130e9, "float32": 130e9},
        link_domain=1 << 16,
        link_bandwidth=12e9,
        link_latency_s=8e-6,
        network_bandwidth=1.2e9,
        network_latency_s=60e-6,
        reserve_bytes=GIB // 2,
        graphs_bytes=0,
        combine_bytes=4,
        overlaps=False,
        kind="cpu",
    ),
}


def resolve_device(name: str, devices_per_node: int) -> Device:
    """A preset by name, or a YAML file.

    Args:
        devices_per_node: CPU cores share the memory of this machine.

    Raises:
        ConfigError: neither; or a file that does not describe a device.
    """
    if name == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return dataclasses.replace(PRESETS["cpu"], memory_bytes=total // max(1, devices_per_node))
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"no device {name!r}: one of {', '.join(PRESETS)}, or a YAML file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys such as memory_bytes, not {values!r}")
    return device_from_dict(values, name=path.stem)


def device_from_dict(values: Mapping[str, Any], *, name: str) -> Device:
    """A device from YAML keys: those of ``Device``, and ``base``, the preset that fills the rest.

    Raises:
        ConfigError: an unknown key, or a value that is no positive number.
    """
    base_name = values.get("base", "h100")
    if base_name not in PRESETS:
        raise ConfigError(f"device file: base {base_name!r} is not one of {', '.join(PRESETS)}")
    base = PRESETS[base_name]
    known = {f.name: f for f in dataclasses.fields(Device)}
    unknown = sorted(set(values) - set(known) - {"base"})
    if unknown:
        raise ConfigError(
            f"device file: unknown {', '.join(unknown)}; known: base, {', '.join(known)}"
        )
    if "memory_bytes" not in values:
        raise ConfigError("device file: memory_bytes is missing")
    changes: dict[str, Any] = {"name": str(values.get("name", name))}
    for key, value in values.items():
        if key in ("base", "name"):
            continue
        if key == "kind":
            if value not in ("gpu", "cpu"):
                raise ConfigError(f"device file: kind must be gpu or cpu, got {value!r}")
            changes[key] = value
        elif key == "overlaps":
            if not isinstance(value, bool):
                raise ConfigError(f"device file: overlaps must be true or false, got {value!r}")
            changes[key] = value
        elif key == "flops":
            changes[key] = _flops(value, base)
        else:
            whole = isinstance(getattr(base, key), int)
            number = _number(key, value, zero=key in ("reserve_bytes", "graphs_bytes"))
            changes[key] = int(number) if whole else number
    return dataclasses.replace(base, **changes)


def _flops(value: Any, base: Device) -> dict[str, float]:
    rates = value if isinstance(value, dict) else {"bfloat16": value}
    own = {str(dtype): _number(f"flops {dtype}", rate) for dtype, rate in rates.items()}
    if "bfloat16" not in own:
        return {**base.flops, **own}
    # A rate that the file does not give is not known: it counts as bfloat16.
    return own


def _number(key: str, value: Any, *, zero: bool = False) -> float:
    # YAML 1.1 reads 80e9, without a dot, as a string.
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if not (number > 0 or (zero and number == 0)) or number == float("inf"):
        raise ConfigError(f"device file: {key} must be a positive number, got {value!r}")
    return number
