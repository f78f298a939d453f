"""What /metrics shows: request histograms kept here, and the engine's counters read at scrape.

One ``Metrics`` per server with a registry of its own (no global state). The API reports every
output through a ``RequestTimer``; the engine reports nothing, it is asked. Names begin with
``coterie_``; per-rank values carry a ``seat`` label.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coterie.runtime.request import RequestOutput

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAUGES = frozenset({"requests_running", "requests_waiting", "epoch", "rank_live"})
HELP = {
    # the engine
    "requests_running": "Choices bound to a rank (a request has n choices).",
    "requests_waiting": "Choices in the engine's queue, bound to no rank yet.",
    "requests_finished_total": "Requests whose choices all finished.",
    "requests_aborted_total": "Requests that ended early: aborted, past their deadline, or failed.",
    "epoch": "Number of the current membership of ranks.",
    "rank_live": "1 while the rank is a member, 0 once it is lost.",
    # an attention rank
    "kv_blocks_free": "KV blocks that are free or hold only cached prefixes.",
    "kv_blocks_capacity": "KV blocks in all.",
    "kv_evictions": "Cached prefix blocks that gave way to new ones.",
    "scheduler_prefill_tokens": "Prompt tokens computed; cached ones are not among them.",
    "scheduler_decode_tokens": "Rows computed of sequences that already had output.",
    "scheduler_output_tokens": "Tokens sampled.",
    "scheduler_cached_tokens": "Prompt tokens taken from the prefix cache.",
    "scheduler_preemptions": "Sequences that lost their blocks to others and start again.",
    "forward_s": "Time in the decoder's forward pass, waits for experts included.",
    "sample_s": "Time sampling tokens.",
    "steps": "Steps that ran, big ones and decode steps.",
    "decode_steps": "Steps of at most 256 rows.",
    "big_steps": "Steps of more than 256 rows.",
    "step_s": "Time inside decode steps (at most 256 rows), begin to end.",
    "big_step_s": "Time inside big steps (more than 256 rows), begin to end.",
    "exchange_s": "Decode steps: from gate done to experts combined, summed over layers, less the "
    "time this rank itself ran expert kernels.",
    "big_exchange_s": "The same as exchange seconds, in big steps.",
    "align_wait_s": "Time waiting to begin a step together with other attention ranks.",
    "aligns": "Waits to begin a step together with other attention ranks.",
    # an expert rank
    "expert_tokens_total": "Rows this rank's experts computed, summed over experts and layers.",
    "kernel_s": "Time in expert kernels, whichever rank's rows they were.",
    "expert_passes": "Passes over one layer's local experts: merged, lone, or a finished job.",
    "merged_passes": "Passes over rows of two or more attention ranks at once.",
    "lone_passes": "Passes over rows of one attention rank alone.",
    "served_rounds": "Rounds of other ranks answered, jobs (rounds of big steps) included.",
    "job_pieces": "Pieces in which rounds of big steps were computed, between small rounds.",
    "gather_wait_s": "Time waiting for rounds of other attention ranks to merge with.",
    "gather_timeouts": "Of these waits, those that ended without all expected rounds.",
    # both
    "sleeps": "Waits in which the rank slept in the kernel instead of polling.",
    "stale_messages": "Messages of steps that were over, dropped.",
}
"""What the engine's counters mean, by their names there."""

Counters = Mapping[str, Any]
"""name -> number, or name -> {seat: number}."""


class EngineCollector(Collector):
    """Turns the engine's counters into metric families at each scrape."""

    def __init__(self, counters: Callable[[], Counters]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, value in sorted(self._counters().items()):
            by_seat = value if isinstance(value, Mapping) else None
            labels = ["seat"] if by_seat is not None else []
            family = _family(name, labels)
            if by_seat is None:
                family.add_metric([], float(value))
            else:
                for seat, number in by_seat.items():
                    if number is not None:
                        family.add_metric([str(seat)], float(number))
            yield family

    def describe(self) -> list[Any]:
        return []  # names are known at scrape time only


def _family(name: str, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
    base = name if name.startswith("coterie_") else f"coterie_{name}"
    base = base.removesuffix("_total")
    if base.endswith("_s"):
        base = f"{base}econds"
    text = HELP.get(name, name)
    if name in _GAUGES or name.startswith("kv_blocks"):
        return GaugeMetricFamily(base, text, labels=labels)
    return CounterMetricFamily(base, text, labels=labels)


class Metrics:
    """The registry of one server.

    Args:
        counters: read at every scrape; see ``Counters``.
    """

    def __init__(self, counters: Callable[[], Counters]) -> None:
        disable_created_metrics()  # a gauge more per family, of no use to anybody
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(counters))

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.ttft = histogram(
            "coterie_time_to_first_token_seconds",
            "From arrival to the first token of any of its choices.",
        )
        self.itl = histogram(
            "coterie_inter_token_latency_seconds", "Between consecutive outputs of one choice."
        )
        self.e2e = histogram(
            "coterie_e2e_request_latency_seconds",
            "From arrival to the end of a request that did not fail.",
        )
        self.prompt_tokens = counter("coterie_prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = counter(
            "coterie_prompt_cached_tokens", "Of coterie_prompt_tokens, found in the prefix cache."
        )
        self.generation_tokens = counter("coterie_generation_tokens", "Tokens sent to clients.")
        self.finished = counter(
            "coterie_request_success", "Choices that ended, by reason.", ("finished_reason",)
        )
        self.failed = counter("coterie_request_failure", "Requests that failed.", ("error",))

    def render(self) -> bytes:
        """Prometheus text exposition."""
        return generate_latest(self.registry)


class RequestTimer:
    """Times one request, all its choices."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._metrics, self._clock = metrics, clock
        self._start = clock()
        self._last: dict[int, float] = {}

    def output(self, output: RequestOutput) -> None:
        """Count one output as it passes to the client."""
        metrics, now = self._metrics, self._clock()
        if output.token_ids:
            metrics.generation_tokens.inc(len(output.token_ids))
            last = self._last.get(output.index)
            if last is not None:
                metrics.itl.observe(now - last)
            elif not self._last:
                metrics.ttft.observe(now - self._start)
                metrics.prompt_tokens.inc(output.num_prompt_tokens)
                metrics.cached_tokens.inc(output.num_cached_tokens)
            self._last[output.index] = now
        if output.finish_reason is not None:
            metrics.finished.labels(output.finish_reason).inc()

    def end(self, error: BaseException | None = None) -> None:
        """The request left: with an error, or finished."""
        if error is None:
            self._metrics.e2e.observe(self._clock() - self._start)
        else:
            self._metrics.failed.labels(type(error).__name__).inc()
