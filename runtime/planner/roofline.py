"""Roofline estimates of a layout: time per output token, time to first token, tokens per second.

Each part of a step takes the longer of its bytes over bandwidth and its FLOPs over rate (on a CPU
both, one after the other); messages add latency plus bytes. Nothing overlaps but pipeline stages.
A bound to compare layouts by, not a promise. Called by plan.py.
"""

from dataclasses import dataclass

from coterie.runtime.planner.communication import expert_parallel, pipeline, tensor_parallel
from coterie.runtime.planner.layouts import Layout
from coterie.runtime.planner.memory import rank_bytes
from coterie.runtime.planner.routing import touched_share
from coterie.runtime.planner.shape import ModelShape
from coterie.runtime.planner.workload import (
    MAX_BATCHED_TOKENS,
    TIME_IMBALANCE,
    Cluster,
    Workload,
    busiest,
)

ASSUMPTIONS = (
    "times are roofline bounds from the device's peak figures; kernels, scheduling and sampling "
    "come on top",
    "every request is at its full context; tokens choose experts evenly, but the busiest of many "
    f"expert ranks has up to {100 * TIME_IMBALANCE:g} % more than the average",
    f"buffers are sized for prefill steps of {MAX_BATCHED_TOKENS} tokens in each replica",
    "TTFT is of a prompt as long as the context on an idle deployment, nothing cached",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Of one layout under the workload. Times of a decode step are of one token's way through."""

    running: int
    """Requests that run at once: those asked for, as far as they fit."""
    weights_ms: float
    """Reading weights: all but the experts that no token of the step uses."""
    kv_ms: float
    compute_ms: float
    """FLOPs over rate; overlaps with reading."""
    communication_ms: float
    tpot_ms: float
    ttft_s: float
    tokens_per_s: float
    pipeline_bubble: float
    """Idle share of the stages in one prompt's prefill."""

    def describe(self, devices: int) -> dict[str, float | int]:
        """The ``estimates`` object of the JSON report."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"tokens_per_s_per_device": self.tokens_per_s / devices}


def bubble(stages: int, micro_batches: int) -> float:
    """Idle share of a pipeline: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """What one rank reads and computes, over all stages of its replica."""

    dense_bytes: float
    expert_bytes: float
    dense_flops: float
    """Per token."""
    expert_flops: float
    """Per token that comes to the expert group."""


def _model(shape: ModelShape, layout: Layout, workload: Workload) -> _Model:
    dense = experts = numel = 0
    for weight, count in shape.all_weights():
        size = rank_bytes(shape, weight, layout, experts=True) * count
        if weight.split == "experts":
            experts += size
        elif weight.part != "embedding" or shape.tied:
            dense += size
    scale = 1.0
    if workload.num_parameters is not None:
        scale = workload.num_parameters / shape.num_parameters
        if not shape.is_moe:
            dense = round(shape.num_weight_bytes / layout.tp)
    active = shape.active_matrix_parameters
    if shape.experts is not None:
        numel = shape.num_moe_layers * 3 * shape.hidden_size * shape.experts.intermediate_size
        numel *= shape.experts.top_k
    split = layout.ep * layout.expert_shards
    return _Model(
        dense_bytes=dense * scale,
        expert_bytes=experts * scale,
        dense_flops=2 * (active - numel) / layout.tp * scale,
        expert_flops=2 * numel / split * busiest(layout.ep) * scale,
    )


def estimate(
    shape: ModelShape, layout: Layout, cluster: Cluster, workload: Workload, requests: int
) -> Estimates:
    """Estimates for a valid layout that holds ``requests`` requests per replica.

    If none fits, the estimates are of the concurrency asked for, as if memory did not matter.
    """
    model = _model(shape, layout, workload)
    asked = workload.tokens_per_replica(layout.dp)
    replica_running = min(asked, requests) if requests else asked
    running = min(workload.concurrency, replica_running * layout.dp)
    micro_batches = min(layout.pp, replica_running)
    tokens = -(-replica_running // micro_batches)
    # Replicas that share experts send them the tokens of all that are busy.
    together = min(workload.concurrency, tokens * layout.dp) if layout.is_routed else tokens
    device = cluster.device
    touched = 1.0
    if shape.experts is not None:
        share = touched_share(shape.experts, together)
        touched = min(1.0, share * busiest(layout.ep))
    kv_bytes = (
        tokens * workload.context * shape.kv_bytes_per_token_layer(layout.tp) * shape.num_layers
    )
    position_flops = (
        shape.attention.flops_per_position * shape.num_layers * _head_share(shape, layout)
    )
    rate = device.flops_for(shape.weights_dtype)
    act_rate = device.flops_for(shape.dtype)
    dense_s = model.dense_bytes / device.bandwidth
    kv_s = kv_bytes / device.bandwidth
    dense_compute_s = tokens * (
        model.dense_flops / rate + workload.context * position_flops / act_rate
    )
    experts_s = model.expert_bytes * touched / device.bandwidth
    experts_compute_s = together * model.expert_flops / rate
    communication_s = _step_communication(shape, layout, cluster, tokens)
    tpot_s = (
        device.part_s(dense_s + kv_s, dense_compute_s)
        + device.part_s(experts_s, experts_compute_s)
        + communication_s
    )
    return Estimates(
        running=running,
        weights_ms=(dense_s + experts_s) * 1e3,
        kv_ms=kv_s * 1e3,
        compute_ms=(dense_compute_s + experts_compute_s) * 1e3,
        communication_ms=communication_s * 1e3,
        tpot_ms=tpot_s * 1e3,
        ttft_s=_prefill_s(shape, layout, cluster, workload, model, position_flops),
        tokens_per_s=running / tpot_s,
        pipeline_bubble=bubble(layout.pp, -(-workload.context // MAX_BATCHED_TOKENS)),
    )


def _head_share(shape: ModelShape, layout: Layout) -> float:
    return shape.attention.heads_per_rank(layout.tp) / shape.attention.num_heads


def _step_communication(shape: ModelShape, layout: Layout, cluster: Cluster, tokens: int) -> float:
    """Of ``tokens`` rows on their way through all stages and back to the first."""
    layers, moe_layers = shape.num_layers, shape.num_moe_layers
    boundary = pipeline(shape, layout, cluster, tokens, 1)
    return (
        tensor_parallel(shape, layout, cluster, tokens, layers, moe_layers).time_s
        + expert_parallel(shape, layout, cluster, tokens, moe_layers).time_s
        + boundary.time_s * layout.pp
    )


def _prefill_s(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    workload: Workload,
    model: _Model,
    position_flops: float,
) -> float:
    device, tokens = cluster.device, workload.context
    chunks = -(-tokens // MAX_BATCHED_TOKENS)
    rate = device.flops_for(shape.weights_dtype)
    act_rate = device.flops_for(shape.dtype)
    # Each token sees those before it: half of the context on average.
    dense_compute_s = tokens * (model.dense_flops / rate + tokens / 2 * position_flops / act_rate)
    dense_s = device.part_s(chunks * model.dense_bytes / device.bandwidth, dense_compute_s)
    touched = 1.0
    if shape.experts is not None:
        touched = touched_share(shape.experts, min(tokens, MAX_BATCHED_TOKENS))
    experts_s = device.part_s(
        chunks * model.expert_bytes * touched / device.bandwidth,
        tokens * model.expert_flops / rate,
    )
    chunk = -(-tokens // chunks)
    total_s = dense_s + experts_s + chunks * _step_communication(shape, layout, cluster, chunk)
    # p stages work at once, but for the bubble.
    return total_s / layout.pp / (1 - bubble(layout.pp, chunks))
