"""A plan for people: one table of layouts, the ledgers of the best, and what was assumed."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from coterie.runtime.planner.memory import NOT_SUMMED
from coterie.runtime.planner.plan import Plan, PlannedLayout

GIB = 1 << 30
MAX_ROWS = 12


def show(plan: Plan, console: Console) -> None:
    """Print the report."""
    shape, cluster, work = plan.shape, plan.cluster, plan.workload
    lines = [
        f"{shape.name} ({shape.model_type}): "
        f"{(work.num_parameters or shape.num_parameters) / 1e9:.2f} billion parameters, weights in "
        f"{shape.weights_dtype}, {shape.kv_bytes_per_token} bytes of KV a token",
        f"{cluster.num_devices} x {cluster.device.name}: {cluster.nodes} nodes of "
        f"{cluster.devices_per_node}, {cluster.device.memory_bytes / GIB:.1f} GiB each; "
        f"{work.concurrency} requests of {work.context} tokens",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_layouts(plan))
    rest = len(plan.layouts) - MAX_ROWS
    if rest > 0:
        console.print(f"and {rest} more (--json lists all)", markup=False)
    best = plan.layouts[0]
    if best.fits:
        console.print(_memory(best))
        console.print(_communication(best))
    if best.runnable_note:
        console.print(f"{best.layout.label()}: {best.runnable_note}", markup=False, soft_wrap=True)
        runs = next((p for p in plan.layouts if p.fits and not p.runnable_note), None)
        if runs is not None:
            console.print(f"the best that it runs: {runs.layout.label()}", markup=False)
    for assumption in plan.assumptions:
        console.print(f"- {assumption}", markup=False, highlight=False, soft_wrap=True)


def _layouts(plan: Plan) -> Table:
    table = Table("layout", "fits")
    for name in ("KV tokens", "requests", "TPOT ms", "TTFT s", "tok/s"):
        table.add_column(name, justify="right")
    table.add_column("runs", justify="center")
    table.add_column("why")
    for planned in plan.layouts[:MAX_ROWS]:
        estimates, ledger = planned.estimates, planned.ledger
        figures = ["-"] * 3
        if estimates is not None:
            figures = [
                f"{estimates.tpot_ms:.1f}",
                f"{estimates.ttft_s:.2f}",
                f"{estimates.tokens_per_s:.0f}",
            ]
        table.add_row(
            planned.layout.label(),
            "yes" if planned.fits else "no",
            f"{ledger.kv_tokens:,}" if ledger else "-",
            f"{planned.requests} x {planned.layout.dp}",
            *figures,
            "no" if planned.runnable_note else "yes",
            planned.reason,
        )
    table.caption = (
        "KV tokens: of one replica; requests: that fit, replicas counted; runs: on this version"
    )
    return table


def _memory(best: PlannedLayout) -> Table:
    assert best.ledger is not None
    table = Table(title=f"memory of a rank of {best.layout.label()}")
    table.add_column("line")
    table.add_column("GiB", justify="right")
    _add_lines(table, best.ledger.lines, "")
    _add_lines(table, best.ledger.expert_lines, "expert rank: ")
    return table


def _add_lines(table: Table, lines: Mapping[str, int], prefix: str) -> None:
    if not lines:
        return
    for line, size in lines.items():
        if line not in NOT_SUMMED:
            table.add_row(prefix + line, f"{size / GIB:.3f}")
    if "kv_per_token" in lines:
        table.add_row(f"{prefix}(KV of one token, bytes)", str(lines["kv_per_token"]))
    held = sum(size for line, size in lines.items() if line not in NOT_SUMMED)
    table.add_section()
    table.add_row(f"{prefix}sum", f"{held / GIB:.3f}")
    table.add_row(f"{prefix}budget", f"{lines['budget'] / GIB:.3f}")


def _communication(best: PlannedLayout) -> Table:
    assert best.communication is not None
    tokens = best.communication["tokens"]
    table = Table(title=f"sent by a rank in a decode step of {tokens} tokens in its replica")
    table.add_column("what")
    for name in ("messages", "MiB", "of it by network", "bytes ms", "latency ms"):
        table.add_column(name, justify="right")
    for kind in ("tp", "pp", "ep", "dp"):
        traffic = best.communication[kind]
        assert isinstance(traffic, dict)
        if not traffic["calls"] and kind != "dp":
            continue
        table.add_row(
            kind,
            str(traffic["calls"]),
            f"{traffic['bytes'] / (1 << 20):.3f}",
            f"{traffic['network_bytes'] / (1 << 20):.3f}",
            f"{traffic['transfer_ms']:.3f}",
            f"{traffic['latency_ms']:.3f}",
        )
    return table
