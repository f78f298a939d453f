"""Inter-token latency of 8 decoding requests while a long prompt is prefilled on another rank.

python benchmarks/prefill_beside_decode.py
"""

import argparse
import contextlib
import random
import threading
import time

import httpx
import numpy as np
from served import served, stream_completion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prefills", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(0)
    with served() as server:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        common = {"model": model, "temperature": 0, "ignore_eos": True}
        arrivals: list[list[float]] = [[] for _ in range(16)]

        def decoder(index: int) -> None:
            body = common | {"prompt": [7 + index] * 16, "max_tokens": 1900}
            body["data_parallel_rank"] = 0
            # They are still decoding when the server is stopped.
            with httpx.Client() as http, contextlib.suppress(RuntimeError, httpx.HTTPError):
                stream_completion(http, server.url, body, arrivals[index])

        threads = [threading.Thread(target=decoder, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(4)
        seats = {r["seat"]: r["kv_blocks_free"] for r in server.status()["ranks"]}
        quiet_from = time.monotonic()
        time.sleep(8)
        quiet_to = time.monotonic()
        spans = []
        with httpx.Client() as http:
            for _ in range(args.prefills):
                prompt = [rng.randrange(100, 40000) for _ in range(args.prompt_len)]
                start = time.monotonic()
                body = common | {"prompt": prompt, "max_tokens": 1, "data_parallel_rank": 1}
                stream_completion(http, server.url, body, [])
                spans.append((start, time.monotonic()))
        print(f"free KV blocks per seat with 8 decoding: {seats}")
        quiet = gaps(arrivals, [(quiet_from, quiet_to)])
        busy = gaps(arrivals, spans)
        for name, values in (("undisturbed", quiet), ("beside prefill", busy)):
            p50, p99 = np.percentile(values, [50, 99]) * 1e3
            print(f"{name}: n={len(values)} ITL p50={p50:.1f} ms p99={p99:.1f} ms")
        print("TTFT of the prefills:", [f"{b - a:.2f} s" for a, b in spans])
        print(f"p99 ratio = {np.percentile(busy, 99) / np.percentile(quiet, 99):.2f}")


def gaps(arrivals: list[list[float]], spans: list[tuple[float, float]]) -> np.ndarray:
    found = [
        b - a
        for times in arrivals
        for a, b in zip(times, times[1:], strict=False)
        if any(lo <= b and a <= hi for lo, hi in spans)
    ]
    return np.asarray(found)


if __name__ == "__main__":
    main()
