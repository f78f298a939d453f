"""The picture of a benchmark: throughput and TPOT against concurrency, as PNG."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def write_plot(path: Path, title: str, levels: list[dict[str, Any]]) -> None:
    """Two panels over the levels of one run."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, latency = figure.subplots(1, 2)
    concurrency = [level["concurrency"] for level in levels]
    for name, label in (("output_tokens_per_s", "output"), ("total_tokens_per_s", "total")):
        values = [level[name] for level in levels]
        throughput.plot(concurrency, values, marker="o", label=label)
    throughput.set_ylabel("tokens/s")
    for percentile in ("p50", "p90", "p99"):
        points = [(level["concurrency"], level["tpot_ms"]) for level in levels if level["tpot_ms"]]
        latency.plot(
            [point for point, _ in points],
            [figures[percentile] for _, figures in points],
            marker="o",
            label=percentile,
        )
    latency.set_ylabel("time per output token, ms")
    for panel in (throughput, latency):
        panel.set_xscale("log", base=2)
        panel.set_xticks(concurrency, [str(value) for value in concurrency])
        panel.set_xlabel("concurrency")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
