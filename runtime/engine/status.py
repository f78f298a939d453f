"""The ``/status`` document and rank counters, from what the supervisor knows. Pure."""

from typing import Any

from coterie.runtime.cluster.layout import Layout
from coterie.runtime.cluster.seat import Seat
from coterie.runtime.cluster.supervisor import Supervisor

DEAD = "dead"


def document(
    supervisor: Supervisor,
    layout: Layout,
    *,
    running: int,
    waiting: int,
    finished: int,
    aborted: int,
) -> dict[str, Any]:
    """``/status``; later versions only add fields.

    Args:
        running, waiting: choices (a request has n of them).
        finished, aborted: requests since the start.
    """
    return {
        "epoch": supervisor.epoch,
        "layout": layout.describe(),
        "ranks": [_rank(seat) for seat in supervisor.seats.values()],
        "requests": {
            "running": running,
            "waiting": waiting,
            "finished": finished,
            "aborted": aborted,
        },
    }


def _rank(seat: Seat) -> dict[str, Any]:
    known = seat.status
    attention = "attention" in seat.spec.roles
    return {
        "seat": seat.spec.seat,
        "roles": list(seat.spec.roles),
        "pid": seat.address.pid if seat.address else None,
        "node": seat.address.node if seat.address else None,
        "state": _state(seat),
        "step": known.step if known else 0,
        "last_commit_age_s": known.last_commit_age_s if known and attention else None,
        "kv_blocks_free": known.kv_blocks_free if known else 0,
        "kv_blocks_total": known.kv_blocks_total if known else 0,
        "experts": {
            "layers": known.expert_layers if known else 0,
            "physical_ids": list(known.physical_ids) if known else [],
            "tokens": list(known.expert_tokens) if known else [],
        },
    }


def _state(seat: Seat) -> str:
    if seat.lost is not None:
        return DEAD
    if seat.status is not None:
        return seat.status.state
    return seat.heartbeat.state if seat.heartbeat is not None else "joining"


def rank_health(supervisor: Supervisor) -> list[dict[str, Any]]:
    """One entry per seat: {"seat", "state", "error"}."""
    return [
        {
            "seat": number,
            "state": DEAD if seat.lost else seat.heartbeat.state if seat.heartbeat else "joining",
            "error": str(seat.lost) if seat.lost else None,
        }
        for number, seat in supervisor.seats.items()
    ]


def rank_counters(supervisor: Supervisor) -> dict[str, float | dict[int, float]]:
    """Counters by name and seat, as of each rank's last status."""
    merged: dict[str, dict[int, float]] = {}
    for number, seat in supervisor.seats.items():
        merged.setdefault("rank_live", {})[number] = float(seat.lost is None)
        known = seat.status
        if known is None:
            continue
        gauges = {
            "kv_blocks_free": known.kv_blocks_free,
            "kv_blocks_capacity": known.kv_blocks_total,
            "expert_tokens_total": sum(known.expert_tokens),
        }
        for name, value in (gauges | known.counters).items():
            merged.setdefault(name, {})[number] = float(value)
    return dict(merged)
