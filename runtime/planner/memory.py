"""The memory ledger: what one rank of a layout holds, line by line, and how much KV is left.

Of a pipeline it shows the stage with the least room for KV; of a disaggregated layout an attention
rank, with the expert rank beside it. Pure integers, in bytes. Called by plan.py.
"""

from dataclasses import dataclass, field

from coterie.runtime.planner.layouts import Layout
from coterie.runtime.planner.routing import distinct_destinations
from coterie.runtime.planner.shape import ModelShape, Weight
from coterie.runtime.planner.stages import balance
from coterie.runtime.planner.workload import (
    BUFFER_IMBALANCE,
    MAX_BATCHED_TOKENS,
    Cluster,
    Workload,
)

Lines = dict[str, int]
NOT_SUMMED = ("kv_per_token", "budget")
"""Lines that say something else than bytes held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """One rank's memory."""

    lines: Lines
    """``weights_*``, workspace, graphs, dispatch_buffers, expert_workspace, reserve and kv_cache
    add up to at most ``budget``; ``kv_per_token`` is of this rank."""
    kv_tokens: int
    """Of a replica; 0 if the rest does not fit."""
    shortfall: int
    """Bytes that are missing before any KV."""
    expert_lines: Lines = field(default_factory=dict)
    """Of an expert rank, in a disaggregated layout."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage."""

    @property
    def weights(self) -> int:
        return sum(size for line, size in self.lines.items() if line.startswith("weights"))


def make_ledger(shape: ModelShape, layout: Layout, cluster: Cluster, workload: Workload) -> Ledger:
    """The ledger of a valid layout."""
    budget = round(cluster.device.memory_bytes * workload.memory_utilization)
    bounds = balance(_layer_costs(shape, layout), *_end_costs(shape, layout), layout.pp)
    even = workload.num_parameters is not None and not shape.is_moe
    if even:
        bounds = balance([1] * shape.num_layers, 0, 0, layout.pp)
    worst: Ledger | None = None
    for stage, (start, stop) in enumerate(bounds):
        lines = _stage_weights(shape, layout, start, stop, stage, workload)
        lines |= _buffers(shape, layout, cluster, workload, lines)
        kv = shape.kv_bytes_per_token_layer(layout.tp) * (stop - start)
        ledger = _with_kv(lines, kv, budget)
        if worst is None or (ledger.kv_tokens, -ledger.shortfall) < (
            worst.kv_tokens,
            -worst.shortfall,
        ):
            worst = ledger
    assert worst is not None, "a layout without stages"
    expert_lines = _expert_rank(shape, layout, workload, budget) if layout.disaggregated else {}
    shortfall = max(worst.shortfall, _held(expert_lines) - budget if expert_lines else 0)
    return Ledger(
        lines=worst.lines,
        kv_tokens=0 if shortfall > 0 else worst.kv_tokens,
        shortfall=shortfall,
        expert_lines=expert_lines,
        stages=tuple(stop - start for start, stop in bounds),
    )


def _held(lines: Lines) -> int:
    return sum(size for line, size in lines.items() if line not in NOT_SUMMED)


def _with_kv(lines: Lines, kv_per_token: int, budget: int) -> Ledger:
    room = budget - _held(lines)
    tokens = max(0, room // kv_per_token)
    lines = {**lines, "kv_cache": tokens * kv_per_token}
    lines |= {"kv_per_token": kv_per_token, "budget": budget}
    return Ledger(lines=lines, kv_tokens=tokens, shortfall=max(0, -room))


def rank_bytes(shape: ModelShape, weight: Weight, layout: Layout, *, experts: bool) -> int:
    """Bytes of a weight on the fullest rank."""
    size, attention, tp = weight.num_bytes, shape.attention, layout.tp
    if weight.split == "heads":
        return -(-size * attention.heads_per_rank(tp) // attention.num_heads)
    if weight.split == "kv_heads":
        return -(-size * attention.kv_heads_per_rank(tp) // attention.num_kv_heads)
    if weight.split == "columns":
        return -(-size // tp)
    if weight.split == "all":
        return size
    assert shape.experts is not None
    if not experts:
        return 0
    local = -(-shape.experts.num_experts // layout.ep)
    return -(-size * local // (shape.experts.num_experts * layout.expert_shards))


def _layer_costs(shape: ModelShape, layout: Layout) -> list[int]:
    cost = [
        sum(rank_bytes(shape, w, layout, experts=not layout.disaggregated) for w in kind.weights)
        for kind in shape.kinds
    ]
    return [cost[kind] for kind in shape.kind_of_layer]


def _end_costs(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    first = sum(rank_bytes(shape, w, layout, experts=False) for w in shape.first)
    last = sum(rank_bytes(shape, w, layout, experts=False) for w in shape.last)
    return first, last + (first if shape.tied and layout.pp > 1 else 0)


def _stage_weights(
    shape: ModelShape, layout: Layout, start: int, stop: int, stage: int, workload: Workload
) -> Lines:
    parameters = workload.num_parameters
    if parameters is not None and not shape.is_moe:
        per_weight = shape.num_weight_bytes / shape.num_parameters
        return {"weights": -(-round(parameters * per_weight) // (layout.tp * layout.pp))}
    found = [
        (w, count)
        for kind, count in shape.kinds_in(start, stop).items()
        for w in shape.kinds[kind].weights
    ]
    if stage == 0:
        found += [(w, 1) for w in shape.first]
    if stage == layout.pp - 1:
        found += [(w, 1) for w in shape.last]
        if shape.tied and layout.pp > 1:
            found += [(w, 1) for w in shape.first]
    lines: Lines = {}
    copies = 0
    for weight, count in found:
        size = rank_bytes(shape, weight, layout, experts=not layout.disaggregated)
        if weight.split == "kv_heads" and layout.tp > shape.attention.num_kv_heads:
            # What a KV head's projections cost more for being on several ranks.
            share = -(-weight.num_bytes // layout.tp)
            copies += (size - share) * count
            size = share
        line = f"weights_{weight.part}"
        lines[line] = lines.get(line, 0) + size * count
    lines = {line: size for line, size in lines.items() if size}
    if copies:
        lines["weights_kv_copies"] = copies
    if parameters is not None:
        lines = {k: v * parameters // shape.num_parameters for k, v in lines.items()}
    return lines


def _buffers(
    shape: ModelShape, layout: Layout, cluster: Cluster, workload: Workload, lines: Lines
) -> Lines:
    """Everything but weights and KV of an attention rank."""
    running = workload.tokens_per_replica(layout.dp)
    width = 4 * shape.hidden_size + 3 * -(-shape.intermediate_size // layout.tp)
    vocabulary = -(-shape.vocab_size // layout.tp)
    buffers = {
        "workspace": 4 * (MAX_BATCHED_TOKENS * width + running * vocabulary),
        "graphs": cluster.device.graphs_bytes,
    }
    covered = sum(buffers.values()) + lines.get("weights_kv_copies", 0)
    if shape.is_moe:
        if layout.is_routed:
            buffers["dispatch_buffers"] = _dispatch_buffers(shape, layout, cluster)
        if not layout.disaggregated:
            buffers["expert_workspace"] = _expert_workspace(shape, layout)
    buffers["reserve"] = max(0, workload.reserve_bytes - covered)
    return buffers


def _dispatch_buffers(shape: ModelShape, layout: Layout, cluster: Cluster) -> int:
    """Rows sent and their replies, and on a rank with experts rows received and replies to them."""
    assert shape.experts is not None
    row = shape.hidden_size * (shape.act_bytes + cluster.device.combine_bytes)
    ranks = layout.ep * layout.expert_shards
    destinations = distinct_destinations(shape.experts, layout.ep) * layout.expert_shards
    rows = -(-MAX_BATCHED_TOKENS // layout.tp)
    sent = rows * destinations
    received = 0.0
    if not layout.disaggregated:
        everybody = rows * layout.tp * layout.dp
        received = min(everybody * destinations / ranks * BUFFER_IMBALANCE, everybody)
    return round((sent + received) * row)


def _expert_workspace(shape: ModelShape, layout: Layout) -> int:
    """Gate, up and down of every (token, expert) pair of the busiest rank, in float32."""
    experts = shape.experts
    assert experts is not None
    tokens = MAX_BATCHED_TOKENS * (layout.dp if layout.is_routed else 1)
    imbalance = BUFFER_IMBALANCE if layout.ep > 1 else 1.0
    pairs = min(tokens * experts.top_k / layout.ep * imbalance, tokens * experts.top_k)
    return round(pairs * 3 * experts.intermediate_size / layout.expert_shards * 4)


def _expert_rank(shape: ModelShape, layout: Layout, workload: Workload, budget: int) -> Lines:
    """A rank with experts only."""
    experts = shape.experts
    assert experts is not None
    weights = sum(
        rank_bytes(shape, w, layout, experts=True) * count
        for w, count in shape.all_weights()
        if w.split == "experts"
    )
    if workload.num_parameters is not None:
        weights = weights * workload.num_parameters // shape.num_parameters
    tokens = MAX_BATCHED_TOKENS * layout.dp
    share = distinct_destinations(experts, layout.ep) / layout.ep * BUFFER_IMBALANCE
    rows = min(tokens * share, tokens)
    return {
        "weights_experts": weights,
        "dispatch_buffers": round(rows * shape.hidden_size * (shape.act_bytes + 4)),
        "expert_workspace": _expert_workspace(shape, layout),
        "reserve": workload.reserve_bytes,
        "budget": budget,
    }
