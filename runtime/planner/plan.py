"""``plan``: every layout for a model on a cluster, with its ledgers, the best first.

Pure and quick: numbers in, numbers out; no weights, no devices, no torch. Called by the command
line.
"""

from dataclasses import dataclass
from typing import Any

from coterie.runtime.planner import runnable
from coterie.runtime.planner.communication import decode_ledger
from coterie.runtime.planner.layouts import Layout, enumerate_layouts, why_invalid
from coterie.runtime.planner.memory import Ledger, make_ledger
from coterie.runtime.planner.rank import Rules, Sized
from coterie.runtime.planner.roofline import ASSUMPTIONS, Estimates, estimate
from coterie.runtime.planner.shape import ModelShape
from coterie.runtime.planner.workload import Cluster, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayout:
    """One layout that was considered."""

    layout: Layout
    fits: bool
    """Weights, buffers, reserve and the KV of at least one request."""
    reason: str
    ledger: Ledger | None = None
    """None if the model cannot be cut like this; so are the two below."""
    communication: dict[str, object] | None = None
    estimates: Estimates | None = None
    requests: int = 0
    """That fit into one replica."""
    total_requests: int = 0
    runnable_note: str = ""

    def describe(self) -> dict[str, Any]:
        """One element of ``layouts`` in the JSON report."""
        ledger = self.ledger
        world = self.layout.world_size
        return {
            "layout": self.layout.describe(),
            "fits": self.fits,
            "kv_tokens": ledger.kv_tokens if ledger else 0,
            "requests": self.requests,
            "memory": dict(ledger.lines) if ledger else {},
            "communication": self.communication or {},
            "estimates": self.estimates.describe(world) if self.estimates else {},
            "reason": self.reason,
            "total_requests": self.total_requests,
            "expert_rank_memory": dict(ledger.expert_lines) if ledger else {},
            "pipeline_layers": list(ledger.stages) if ledger else [],
            "runnable": not self.runnable_note,
            "runnable_note": self.runnable_note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Layouts, the best first."""

    shape: ModelShape
    cluster: Cluster
    workload: Workload
    layouts: tuple[PlannedLayout, ...]

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (*self.shape.assumptions, *ASSUMPTIONS)

    def describe(self) -> dict[str, Any]:
        """The JSON report."""
        shape, device = self.shape, self.cluster.device
        return {
            "layouts": [planned.describe() for planned in self.layouts],
            "model": {
                "name": shape.name,
                "model_type": shape.model_type,
                "num_parameters": self.workload.num_parameters or shape.num_parameters,
                "weights_dtype": shape.weights_dtype,
                "weights_bytes": shape.num_weight_bytes,
                "kv_bytes_per_token": shape.kv_bytes_per_token,
            },
            "cluster": {
                "device": device.name,
                "devices": self.cluster.num_devices,
                "devices_per_node": self.cluster.devices_per_node,
                "nodes": self.cluster.nodes,
                "memory_bytes": device.memory_bytes,
            },
            "assumptions": list(self.assumptions),
        }


def plan(shape: ModelShape, cluster: Cluster, workload: Workload) -> Plan:
    """Consider every layout.

    Returns:
        All of them: those that fit by preference, then those that do not, by how much is missing,
        then those the model cannot be cut into.
    """
    sized, invalid = [], []
    for layout in enumerate_layouts(shape, cluster.num_devices):
        why = why_invalid(shape, layout)
        if why is not None:
            invalid.append(PlannedLayout(layout=layout, fits=False, reason=why))
        else:
            sized.append(_size(shape, layout, cluster, workload))
    whole = (s for s in sized if s.layout.ranks_per_replica == 1 and not s.layout.is_routed)
    held = max((s.total_requests for s in sized), default=0)
    rules = Rules(
        shape=shape,
        cluster=cluster,
        workload=workload,
        one_card=any(s.fits for s in whole),
        most_held=min(held, workload.concurrency),
    )
    sized.sort(key=rules.key)
    layouts = [
        PlannedLayout(
            layout=s.layout,
            fits=s.fits,
            reason=rules.reason(s),
            ledger=s.ledger,
            communication=decode_ledger(
                shape, s.layout, cluster, workload.tokens_per_replica(s.layout.dp)
            ),
            estimates=s.estimates,
            requests=s.requests,
            total_requests=s.total_requests,
            runnable_note=runnable.note(shape, s.layout, cluster.device),
        )
        for s in sized
    ]
    return Plan(shape=shape, cluster=cluster, workload=workload, layouts=(*layouts, *invalid))


def _size(shape: ModelShape, layout: Layout, cluster: Cluster, workload: Workload) -> Sized:
    ledger = make_ledger(shape, layout, cluster, workload)
    requests = ledger.kv_tokens // workload.context
    return Sized(
        layout=layout,
        ledger=ledger,
        estimates=estimate(shape, layout, cluster, workload, requests),
        requests=requests,
        total_requests=requests * layout.dp,
        fits=requests > 0,
    )
