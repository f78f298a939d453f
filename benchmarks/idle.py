"""CPU of ranks that have nothing to do: python benchmarks/idle.py

First no request anywhere on the default layout, then 2 attention ranks and 1 expert rank where
only one attention rank decodes.
"""

import argparse
import contextlib
import threading
import time

import httpx
import psutil
from served import Served, served, stream_completion


def cpu_share(pids: dict[int, int], seconds: float) -> dict[int, float]:
    """Seat -> used share of one core over the next ``seconds``."""
    used = {seat: sum(psutil.Process(pid).cpu_times()[:2]) for seat, pid in pids.items()}
    time.sleep(seconds)
    return {
        seat: (sum(psutil.Process(pid).cpu_times()[:2]) - used[seat]) / seconds
        for seat, pid in pids.items()
    }


def rank_pids(server: Served) -> dict[int, int]:
    return {rank["seat"]: rank["pid"] for rank in server.status()["ranks"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    with served() as server:
        time.sleep(3)
        shares = cpu_share(rank_pids(server), args.seconds)
        print("no request anywhere:", {s: f"{100 * v:.2f} %" for s, v in shares.items()})
    with served("--attention-ranks", "2", "--expert-ranks", "1") as server:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": [5] * 16, "max_tokens": 1500}
        body |= {"temperature": 0, "ignore_eos": True}

        def client() -> None:
            with httpx.Client() as http, contextlib.suppress(RuntimeError, httpx.HTTPError):
                stream_completion(http, server.url, body, [])

        threading.Thread(target=client, daemon=True).start()
        time.sleep(3)
        before = server.metrics()["steps"]
        shares = cpu_share(rank_pids(server), args.seconds)
        after = server.metrics()["steps"]
        print("2A+1E, one request:", {s: f"{100 * v:.2f} %" for s, v in shares.items()})
        print("steps meanwhile:", {s: after[s] - before[s] for s in after})


if __name__ == "__main__":
    main()
