"""Seconds from the command `coterie serve` until /health/ready: python benchmarks/startup.py"""

import argparse
import statistics

from served import served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="arguments of coterie serve")
    args = parser.parse_args()
    times = []
    for _ in range(args.repeats):
        with served(*args.serve) as server:
            times.append(server.ready_s)
            print(f"ready after {server.ready_s:.1f} s", flush=True)
    print(f"median {statistics.median(times):.1f} s")


if __name__ == "__main__":
    main()
