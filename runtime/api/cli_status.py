"""``coterie status``: the ranks and requests of a running server."""

import argparse
import json
from typing import Any

import httpx
from rich.table import Table

from coterie.errors import EngineDead, RuntimeFailure
from coterie.runtime.api.cli_output import table_console

_TIMEOUT_S = 10.0


def run(args: argparse.Namespace) -> int:
    status = fetch_json(args.url, "/status", args.api_key)
    if args.json:
        print(json.dumps(status))
    else:
        show(status)
    return 0


def fetch_json(url: str, path: str, api_key: str | None) -> dict[str, Any]:
    """GET a JSON object.

    Raises:
        EngineDead: nobody answers there.
        RuntimeFailure: the answer is an error.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(url.rstrip("/") + path, headers=headers, timeout=_TIMEOUT_S)
        body = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EngineDead(f"no Coterie server answers at {url}: {error}") from error
    if reply.status_code != 200:
        raise RuntimeFailure(f"{url}{path} answered {reply.status_code}: {reply.text[:200]}")
    return dict(body)


def show(status: dict[str, Any]) -> None:
    requests = status["requests"]
    console = table_console()
    layout = status["layout"]
    if isinstance(layout, dict):
        layout = ", ".join(f"{name} {value}" for name, value in layout.items())
    console.print(f"epoch {status['epoch']}, layout: {layout}", markup=False, soft_wrap=True)
    table = Table("seat", "roles", "pid", "node", "state", "step", "last commit", "KV blocks free")
    table.add_column("experts")
    for rank in status["ranks"]:
        age, experts = rank["last_commit_age_s"], rank.get("experts") or {}
        table.add_row(
            str(rank["seat"]),
            "+".join(rank["roles"]),
            str(rank["pid"]),
            str(rank["node"]),
            str(rank["state"]),
            str(rank["step"]),
            "-" if age is None else f"{age:.1f} s ago",
            f"{rank['kv_blocks_free']}/{rank['kv_blocks_total']}",
            str(len(experts.get("physical_ids") or ())),
        )
    console.print(table)
    console.print(", ".join(f"{name} {count}" for name, count in requests.items()), markup=False)
