"""Records to figures: throughput, latency percentiles, peak memory; table and JSON. No plotting."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from coterie.runtime.bench.load import Record

PERCENTILES = (50, 90, 99)


def summarize(records: list[Record], concurrency: int, peak_bytes: int | None) -> dict[str, Any]:
    """Figures of one level. Latencies in milliseconds; None where nothing was measured."""
    good = [record for record in records if record.error is None and record.ttft_s is not None]
    errors = [record.error for record in records if record.error is not None]
    start = min((record.start_s for record in records), default=0.0)
    end = max((record.start_s + record.e2e_s for record in good), default=start)
    duration = end - start
    output = sum(record.output_tokens for record in good)
    total = output + sum(record.prompt_tokens for record in good)
    return {
        "concurrency": concurrency,
        "requests": len(records),
        "failed": len(records) - len(good),
        "first_error": errors[0] if errors else None,
        "duration_s": duration,
        "output_tokens": output,
        "total_tokens": total,
        "output_tokens_per_s": output / duration if duration > 0 else 0.0,
        "total_tokens_per_s": total / duration if duration > 0 else 0.0,
        "requests_per_s": len(good) / duration if duration > 0 else 0.0,
        "ttft_ms": _percentiles([r.ttft_s for r in good if r.ttft_s is not None]),
        "tpot_ms": _percentiles([tpot for r in good if (tpot := r.tpot_s) is not None]),
        "itl_ms": _percentiles([gap for r in good for gap in r.gaps_s]),
        "e2e_ms": _percentiles([r.e2e_s for r in good]),
        "peak_memory_bytes": peak_bytes,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds) * 1e3, PERCENTILES)
    figures = {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
    return figures | {"mean": float(np.mean(seconds) * 1e3)}


def print_table(levels: list[dict[str, Any]], console: Console) -> None:
    """One row a level."""
    table = Table(title="latencies in ms: p50 / p90 / p99")
    columns = ("conc.", "requests", "output tok/s", "total tok/s", "TTFT", "TPOT", "ITL", "peak")
    for column in columns:
        table.add_column(column, justify="right")
    for level in levels:
        requests = str(level["requests"])
        if level["failed"]:
            requests += f" ({level['failed']} failed)"
        peak = level["peak_memory_bytes"]
        table.add_row(
            str(level["concurrency"]),
            requests,
            f"{level['output_tokens_per_s']:.1f}",
            f"{level['total_tokens_per_s']:.1f}",
            *(_triple(level[name]) for name in ("ttft_ms", "tpot_ms", "itl_ms")),
            "-" if peak is None else f"{peak / 2**20:.0f} MiB",
        )
    console.print(table)


def _triple(figures: dict[str, float] | None) -> str:
    if figures is None:
        return "-"
    return " / ".join(f"{figures[f'p{p}']:.1f}" for p in PERCENTILES)


def write_json(path: Path, settings: dict[str, Any], levels: list[dict[str, Any]]) -> None:
    body = {"settings": settings, "levels": levels}
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


class MemoryWatch:
    """Peak of the summed PSS of some processes, sampled twice a second on a thread.

    PSS, because ranks share weights and rings: a sum of RSS would count those twice.

    Args:
        pids: asked for at every sample.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], interval_s: float = 0.5) -> None:
        self._pids, self._interval_s = pids, interval_s
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=10.0)

    def take_peak(self) -> int:
        """The peak since the last call, bytes; measures at least once."""
        peak, self._peak = max(self._peak, pss_bytes(self._pids())), 0
        return peak

    def _watch(self) -> None:
        while not self._done.wait(self._interval_s):
            self._peak = max(self._peak, pss_bytes(self._pids()))


def pss_bytes(pids: Sequence[int]) -> int:
    """Summed proportional set size; processes that are gone count nothing."""
    total = 0
    for pid in pids:
        try:
            memory = psutil.Process(pid).memory_full_info()
        except psutil.Error:
            continue
        total += int(getattr(memory, "pss", 0) or memory.rss)
    return total
