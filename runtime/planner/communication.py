"""The communication ledger: calls, bytes and time of one rank in one decode step, by link.

Bytes are what a rank sends. The fast link connects a domain (NVLink, shared memory); the network
connects domains. Exchange of the vocabulary (embedding, logits) is not counted: it is two messages
a step. Called by plan.py, and by roofline.py for steps of other sizes.
"""

from dataclasses import dataclass

from coterie.runtime.planner.layouts import Layout
from coterie.runtime.planner.routing import distinct_destinations
from coterie.runtime.planner.shape import ModelShape
from coterie.runtime.planner.workload import Cluster

MAX_PEER_HOPS = 32
"""Latency of a dispatch grows with its peers up to here; beyond, messages overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Messages of one kind."""

    calls: int = 0
    link_bytes: float = 0.0
    network_bytes: float = 0.0
    transfer_s: float = 0.0
    """Bytes over bandwidth; both links work at once."""
    latency_s: float = 0.0

    @property
    def time_s(self) -> float:
        return self.transfer_s + self.latency_s

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(
            calls=self.calls * times,
            link_bytes=self.link_bytes * times,
            network_bytes=self.network_bytes * times,
            transfer_s=self.transfer_s * times,
            latency_s=self.latency_s * times,
        )

    def describe(self) -> dict[str, float | int]:
        """The numbers of the JSON report."""
        return {
            "calls": self.calls,
            "bytes": round(self.link_bytes + self.network_bytes),
            "link_bytes": round(self.link_bytes),
            "network_bytes": round(self.network_bytes),
            "transfer_ms": self.transfer_s * 1e3,
            "latency_ms": self.latency_s * 1e3,
            "time_ms": self.time_s * 1e3,
        }


def _traffic(
    cluster: Cluster, calls: int, link_bytes: float, network_bytes: float, hops: int
) -> Traffic:
    device = cluster.device
    hop = device.network_latency_s if network_bytes else device.link_latency_s
    return Traffic(
        calls=calls,
        link_bytes=link_bytes,
        network_bytes=network_bytes,
        transfer_s=max(
            link_bytes / device.link_bandwidth, network_bytes / device.network_bandwidth
        ),
        latency_s=calls * hops * hop,
    )


def tensor_parallel(
    shape: ModelShape, layout: Layout, cluster: Cluster, tokens: int, layers: int, moe_layers: int
) -> Traffic:
    """Ring all-reduces of ``tokens`` rows: each rank sends 2 (N - 1) / N of them.

    Two a layer, behind attention and behind the MLP. Where experts are spread beyond the TP group,
    each rank dispatches its own slice of the rows, so behind them only the slices are gathered.
    """
    n = layout.tp
    if n == 1:
        return Traffic()
    message = tokens * shape.hidden_size * shape.act_bytes
    gathers = moe_layers if layout.is_routed else 0
    reduces = 2 * layers - gathers
    sent = (2 * reduces + gathers) * (n - 1) * message / n
    crosses = cluster.crosses(n, layout.world_size)
    # A gather makes half of a reduce's hops.
    traffic = _traffic(
        cluster, reduces, 0.0 if crosses else sent, sent if crosses else 0.0, 2 * (n - 1)
    )
    more = _traffic(cluster, gathers, 0.0, float(crosses), n - 1)
    return Traffic(
        calls=reduces + gathers,
        link_bytes=traffic.link_bytes,
        network_bytes=traffic.network_bytes,
        transfer_s=traffic.transfer_s,
        latency_s=traffic.latency_s + more.latency_s,
    )


def pipeline(
    shape: ModelShape, layout: Layout, cluster: Cluster, tokens: int, micro_batches: int
) -> Traffic:
    """Hidden states of ``tokens`` rows over one stage boundary, in micro-batches."""
    if layout.pp == 1:
        return Traffic()
    sent = float(tokens * shape.hidden_size * shape.act_bytes)
    crosses = cluster.crosses(layout.tp * layout.pp, layout.world_size)
    return _traffic(
        cluster, micro_batches, 0.0 if crosses else sent, sent if crosses else 0.0, hops=1
    )


def remote_destinations(shape: ModelShape, layout: Layout) -> float:
    """Expected ranks other than its home that a token is sent to in a MoE layer."""
    assert shape.experts is not None
    groups = distinct_destinations(shape.experts, layout.ep)
    if layout.disaggregated:
        return groups * layout.expert_shards
    # One shard of one part is at home.
    return groups * (layout.expert_shards - 1 / layout.ep)


def expert_parallel(
    shape: ModelShape, layout: Layout, cluster: Cluster, tokens: int, moe_layers: int
) -> Traffic:
    """Dispatch and combine of a rank's slice of ``tokens`` rows, once to each destination rank."""
    if not layout.is_routed or not moe_layers:
        return Traffic()
    rows = -(-tokens // layout.tp)
    row = shape.hidden_size * (shape.act_bytes + cluster.device.combine_bytes)
    sent = rows * remote_destinations(shape, layout) * row * moe_layers
    group = layout.ep * layout.expert_shards + layout.disaggregated * layout.attention_ranks
    near = 1.0
    if cluster.crosses(group, max(group, layout.world_size)):
        near = max(0, min(cluster.domain, group) - 1) / max(1, group - 1)
    # A message to each peer, posted one after the other.
    hops = min(MAX_PEER_HOPS, layout.ep * layout.expert_shards - (not layout.disaggregated))
    return _traffic(cluster, 2 * moe_layers, sent * near, sent * (1 - near), hops)


def decode_ledger(
    shape: ModelShape, layout: Layout, cluster: Cluster, tokens: int
) -> dict[str, object]:
    """One decode step of a replica with ``tokens`` running requests: the JSON's communication."""
    layers, moe_layers = -(-shape.num_layers // layout.pp), -(-shape.num_moe_layers // layout.pp)
    # Stages work on micro-batches, each with messages of its own.
    micro_batches = min(layout.pp, tokens)
    rows = -(-tokens // micro_batches)
    parts = {
        "tp": tensor_parallel(shape, layout, cluster, rows, layers, moe_layers) * micro_batches,
        "pp": pipeline(shape, layout, cluster, rows * micro_batches, micro_batches),
        "ep": expert_parallel(shape, layout, cluster, rows, moe_layers) * micro_batches,
        "dp": Traffic(),
    }
    described: dict[str, dict[str, float | int]] = {k: t.describe() for k, t in parts.items()}
    if layout.tp > 1:
        described["tp"]["message_bytes"] = rows * shape.hidden_size * shape.act_bytes
    if shape.experts is not None and layout.is_routed:
        row = shape.hidden_size * (shape.act_bytes + cluster.device.combine_bytes)
        remote = remote_destinations(shape, layout)
        described["ep"] |= {
            "remote_destinations": remote,
            "bytes_per_token_per_layer": round(remote * row),
            "bytes_per_token_per_layer_without_deduplication": shape.experts.top_k * row,
        }
    link = sum(t.link_bytes for t in parts.values())
    network = sum(t.network_bytes for t in parts.values())
    return {
        "tokens": tokens,
        **described,
        "calls": sum(t.calls for t in parts.values()),
        "bytes": round(link + network),
        "time_ms": sum(t.time_s for t in parts.values()) * 1e3,
        "by_link": {"link": round(link), "network": round(network)},
    }
