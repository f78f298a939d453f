"""A `coterie serve` process of its own for a benchmark: start, read its metrics, stop."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

METRIC = re.compile(r"^(\w+?)(?:_total)?(?:\{(.*)\})? ([-+.\deE]+|NaN|\+Inf)$")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


@dataclass(kw_only=True)
class Served:
    """A running server.

    Attributes:
        ready_s: seconds from spawning the command until /health/ready answered 200.
    """

    url: str
    process: subprocess.Popen[bytes]
    ready_s: float

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=10).json()
        return answer

    def metrics(self) -> dict[str, dict[int, float]]:
        """Counters and gauges with a seat label: name (without coterie_) -> seat -> value."""
        found: dict[str, dict[int, float]] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            match = METRIC.match(line)
            if match and match[2] and (seat := re.search(r'seat="(\d+)"', match[2])):
                name = match[1].removeprefix("coterie_")
                found.setdefault(name, {})[int(seat[1])] = float(match[3])
        return found

    def family_pids(self) -> list[int]:
        """Server and ranks; the ranks come from /status because Ray owns them."""
        return [self.process.pid, *(rank["pid"] for rank in self.status()["ranks"])]

    def rss_bytes(self) -> dict[int, int]:
        return {pid: psutil.Process(pid).memory_info().rss for pid in self.family_pids()}


def wait_ready(url: str, process: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Poll /health/ready.

    Raises:
        RuntimeError: the server ended, or was not ready in time.
    """
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with status {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/ready", timeout=2).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"server not ready within {deadline_s} s")


@contextlib.contextmanager
def served(*args: str, deadline_s: float = 120) -> Iterator[Served]:
    """Run ``coterie serve ARGS`` on free loopback ports; stop it with SIGTERM at the end."""
    port, rpc_port = free_ports(2)
    command = [sys.executable, "-m", "coterie.runtime.api.cli", "serve", *args]
    command += ["--port", str(port), "--rpc-port", str(rpc_port)]
    with tempfile.TemporaryFile() as log:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(url, process, deadline_s)
            yield Served(url=url, process=process, ready_s=time.monotonic() - start)
        except Exception:
            log.seek(0, os.SEEK_SET)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def stream_completion(
    client: httpx.Client, url: str, body: dict[str, Any], times: list[float]
) -> int:
    """POST a streaming completion; append the arrival time of every token chunk.

    Returns:
        Number of output tokens by the server's own usage count.
    """
    tokens = 0
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read()[:500]!r}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"error in stream: {chunk['error']}")
            if chunk.get("choices"):
                times.append(time.monotonic())
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return tokens
