"""Share of a decode step that a rank spends exchanging: python benchmarks/exchange_share.py

Sixteen streams decode on the default layout; exchange = time from gate done to combine done in
which the rank runs no kernel (waiting and gather window included), step = time inside decode steps.
"""

import argparse
import random
import statistics
import threading
import time

import httpx
from served import served, stream_completion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="arguments of coterie serve")
    args = parser.parse_args()
    with served(*args.serve) as server:
        shares = [one_run(server, args, repeat) for repeat in range(args.repeats)]
    print(f"median share over {args.repeats} runs: {statistics.median(shares):.3f}")


def one_run(server, args: argparse.Namespace, repeat: int) -> float:  # type: ignore[no-untyped-def]
    rng = random.Random(repeat)
    started = threading.Barrier(args.concurrency + 1)

    def client() -> None:
        prompt = [rng.randrange(100, 40000) for _ in range(32)]
        body = {"model": "default", "prompt": prompt, "max_tokens": args.output_len}
        body |= {"temperature": 0, "ignore_eos": True}
        body["model"] = model
        started.wait()
        with httpx.Client() as http:
            stream_completion(http, server.url, body, [])

    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    threads = [threading.Thread(target=client) for _ in range(args.concurrency)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(3)  # prefill over, decode steady
    before = server.metrics()
    time.sleep(6)
    after = server.metrics()
    running = server.status()["requests"]["running"]
    for thread in threads:
        thread.join()
    delta = {
        name: {seat: value - before.get(name, {}).get(seat, 0) for seat, value in seats.items()}
        for name, seats in after.items()
    }
    exchange, step = sum(delta["exchange_seconds"].values()), sum(delta["step_seconds"].values())
    steps = delta["decode_steps"]
    print(
        f"run {repeat}: running={running} decode steps per seat={steps} "
        f"step={step / sum(steps.values()) * 1e3:.1f} ms exchange share={exchange / step:.3f}"
    )
    return exchange / step


if __name__ == "__main__":
    main()
