"""Are expert weights read once for everybody? python benchmarks/weights_once.py

Poisson arrivals for a while at about 16 running requests on two colocated ranks; compares the
passes over a layer's experts on each expert rank with the steps of the busiest attention rank.
"""

import argparse
import random
import threading
import time

import httpx
from served import served, stream_completion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("serve", nargs="*", help="arguments of coterie serve")
    args = parser.parse_args()
    with served(*args.serve) as server:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        rng, gate = random.Random(0), threading.Semaphore(args.concurrency)
        rate = calibrate(server.url, model, args)
        before, threads, end = server.metrics(), [], time.monotonic() + args.seconds
        failed: list[str] = []

        def client(prompt: list[int]) -> None:
            body = {"model": model, "prompt": prompt, "max_tokens": args.output_len}
            try:
                with gate, httpx.Client() as http:
                    extra = {"temperature": 0, "ignore_eos": True}
                    stream_completion(http, server.url, body | extra, [])
            except Exception as error:
                failed.append(repr(error))

        while time.monotonic() < end:
            time.sleep(rng.expovariate(rate))
            prompt = [rng.randrange(100, 40000) for _ in range(rng.randrange(8, 129))]
            threads.append(threading.Thread(target=client, args=(prompt,)))
            threads[-1].start()
        after = server.metrics()
        for thread in threads:
            thread.join()
        layers = max(rank["experts"]["layers"] for rank in server.status()["ranks"])
    steps = {s: after["steps"][s] - before["steps"].get(s, 0) for s in after["steps"]}
    passes = {
        s: (after["expert_passes"][s] - before["expert_passes"].get(s, 0)) / layers
        for s in after["expert_passes"]
    }
    ratio = sum(passes.values()) / len(passes) / max(steps.values())
    print(f"requests={len(threads)} failed={len(failed)} rate={rate:.2f}/s")
    print(f"steps per attention rank={steps} passes per layer and expert rank={passes}")
    print(f"mean passes / most steps = {ratio:.3f}")


def calibrate(url: str, model: str, args: argparse.Namespace) -> float:
    """Arrival rate that keeps about ``concurrency`` requests running, requests per second."""
    start = time.monotonic()

    def client() -> None:
        body = {"model": model, "prompt": [5] * 64, "max_tokens": args.output_len}
        with httpx.Client() as http:
            stream_completion(http, url, body | {"temperature": 0, "ignore_eos": True}, [])

    threads = [threading.Thread(target=client) for _ in range(args.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return args.concurrency / (time.monotonic() - start)


if __name__ == "__main__":
    main()
