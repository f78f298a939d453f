"""Rounds of 200 concurrent requests of mixed lengths: all finish, blocks return, RSS stays flat.

python benchmarks/soak.py [--rounds 10]
"""

import argparse
import random
import threading
import time

import httpx
from served import served, stream_completion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-output", type=int, default=64)
    args = parser.parse_args()
    rng = random.Random(1)
    with served() as server:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        for number in range(args.rounds):
            start, errors = time.monotonic(), []
            bodies = []
            for _ in range(args.requests):
                prompt = [rng.randrange(100, 40000) for _ in range(rng.choice([3, 17, 60, 200]))]
                tokens = rng.randrange(1, args.max_output + 1)
                body = {"model": model, "prompt": prompt, "max_tokens": tokens}
                bodies.append(body | {"temperature": rng.choice([0, 0.8]), "ignore_eos": True})

            def client(body: dict, errors: list[str] = errors) -> None:
                try:
                    with httpx.Client() as http:
                        count = stream_completion(http, server.url, body, [])
                    if count != body["max_tokens"]:
                        errors.append(f"{count} tokens instead of {body['max_tokens']}")
                except Exception as error:
                    errors.append(repr(error))

            threads = [threading.Thread(target=client, args=(b,)) for b in bodies]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(1)
            status = server.status()
            lost = {r["seat"]: r["kv_blocks_total"] - r["kv_blocks_free"] for r in status["ranks"]}
            rss = {pid: f"{size >> 20} MiB" for pid, size in server.rss_bytes().items()}
            print(
                f"round {number}: {time.monotonic() - start:.1f} s errors={errors[:3]} "
                f"blocks not back={lost} rss={rss} requests={status['requests']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
