"""Commands end to end: generate and serve as processes, chat, status and bench against a server."""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.runtime.api import cli, cli_chat
from coterie.runtime.bench import report, workload
from coterie.runtime.bench.load import Record

COTERIE = [sys.executable, "-m", "coterie.runtime.api.cli"]
TINY = ["--max-model-len", "128", "--num-kv-blocks", "64", "--kernels", "torch"]
ONE_RANK = [*TINY, "--attention-ranks", "1", "--distributed-executor-backend", "mp"]


def test_generate_prints_json_alone(tiny_model_dir: Callable[..., Path]) -> None:
    command = [
        *(*COTERIE, "generate", str(tiny_model_dir("mixtral")), *ONE_RANK, "--json"),
        *("--prompt", "hello", "--prompt-token-ids", "1,2,3", "--prompt", "caf\u00e9"),
        *("--max-tokens", "5", "--temperature", "0", "--ignore-eos", "--dtype", "float32"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    keys = {"prompt_token_ids", "token_ids", "text", "finish_reason"}
    assert [line.keys() for line in lines] == [keys] * 3
    prompts = [list(b"hello"), [1, 2, 3], list("caf\u00e9".encode())]
    assert [line["prompt_token_ids"] for line in lines] == prompts
    assert all(len(line["token_ids"]) == 5 for line in lines)
    assert all(line["finish_reason"] == "length" for line in lines)
    for line in lines:
        assert line["text"] == bytes(t for t in line["token_ids"] if t < 256).decode(
            "utf-8", "replace"
        ) or any(token >= 256 for token in line["token_ids"])


def test_a_layout_that_is_not_built_fails_generate(
    tiny_model_dir: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(tiny_model_dir("mixtral")), *ONE_RANK, "-tp", "2", "--prompt", "x"]
    assert cli.main(command) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.strip().splitlines()[-1].startswith("coterie: error: ")


def test_serve_answers_and_ends_on_sigterm(
    tiny_model_dir: Callable[..., Path], until: Callable[..., None]
) -> None:
    command = [
        *(*COTERIE, "serve", str(tiny_model_dir("mixtral")), *ONE_RANK),
        *("--port", "0", "--rpc-port", "0", "--shutdown-timeout-s", "10"),
    ]
    # The driver process's own deadline: it is ended whatever happens.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        watchdog = threading.Timer(100, p.kill)
        watchdog.start()
        try:
            assert p.stdout is not None
            ready = p.stdout.readline()
            assert ready.startswith("Coterie is ready: "), p.stderr and p.stderr.read()
            assert p.stdout.readline().startswith("curl http://127.0.0.1:")
            url = re.search(r"http://\S+", ready)[0]  # type: ignore[index]
            status = httpx.get(f"{url}/status", timeout=20).json()
            body = {"prompt": "hi", "max_tokens": 3}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
            port = url.rpartition(":")[2]
            taken = subprocess.run(
                [*COTERIE, "serve", *ONE_RANK, "--port", port],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert taken.returncode == 2
            assert "--port" in taken.stderr
            body |= {"max_tokens": 100, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
                lines = reply.iter_lines()
                next(lines)
                p.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]", "a request that runs is finished first"
            assert p.wait(30) == 0
            for rank in status["ranks"]:
                until(lambda pid=rank["pid"]: not _alive(pid))
        finally:
            watchdog.cancel()
            p.kill()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_status(scripted_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", scripted_server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["seat"] == 0
    assert cli.main(["status", "--url", scripted_server.url]) == 0
    assert "attention+experts" in capsys.readouterr().out


@pytest.mark.parametrize("over", ["http", "rpc"])
async def test_chat_keeps_the_conversation(
    scripted_server: Any, capsys: pytest.CaptureFixture[str], over: str
) -> None:
    args = cli.build_parser().parse_args(["chat", "--max-tokens", "60", "--temperature", "0"])
    args.url, args.rpc = scripted_server.url, f"127.0.0.1:{scripted_server.rpc_port}"
    lines = iter(["hi\n", "\n", "again\n", "/clear\n", "new\n"])
    answers = await _converse(args, over, lines)
    out = capsys.readouterr().out
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert answers[0].startswith("system\nbe kind\nuser\nhi")
    assert answers[1].startswith("system\nbe kind\nuser\nhi\nassistant\n")
    assert answers[2].startswith("system\nbe kind\nuser\nnew")


async def _converse(args: argparse.Namespace, over: str, lines: Any) -> list[str]:
    """Run a conversation; the answers as the model gave them."""
    from contextlib import AsyncExitStack

    answers: list[str] = []
    async with AsyncExitStack() as stack:
        connect = cli_chat._ask_http if over == "http" else cli_chat._ask_rpc
        real = await connect(args, stack)

        async def ask(messages: list[dict[str, Any]]) -> Any:
            answers.append("")
            async for delta in real(messages):
                answers[-1] += delta
                yield delta

        async def read_line() -> str | None:
            return next(lines, None)

        await cli_chat.converse(ask, "be kind", read_line)
    return answers


def test_bench_against_a_url(
    scripted_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "run" / "bench"
    command = [
        *("bench", "--base-url", f"{scripted_server.url}/v1", "--concurrency", "1,3"),
        *("--input-len", "5", "--output-len", "6", "--num-prompts", "4", "--output", str(base)),
        *("--request-rate", "200"),
    ]
    assert cli.main(command) == 0
    assert "output tok/s" in capsys.readouterr().out
    body = json.loads(base.with_suffix(".json").read_text())
    assert [level["concurrency"] for level in body["levels"]] == [1, 3]
    for level in body["levels"]:
        assert (level["requests"], level["failed"]) == (4, 0)
        assert (level["output_tokens"], level["total_tokens"]) == (24, 44)
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert level[name]["p50"] <= level[name]["p99"]
    assert base.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_bench_counts_failures() -> None:
    good = Record(start_s=1.0, ttft_s=0.5, e2e_s=1.5, gaps_s=[0.5, 0.5], output_tokens=3)
    good.prompt_tokens = 7
    figures = report.summarize([good, Record(start_s=1.0, error="boom")], 2, None)
    assert (figures["failed"], figures["first_error"]) == (1, "boom")
    assert figures["output_tokens_per_s"] == pytest.approx(2.0)
    assert figures["total_tokens_per_s"] == pytest.approx(10 / 1.5)
    assert figures["tpot_ms"]["p50"] == pytest.approx(500.0)


def test_workloads_are_seeded(tmp_path: Path) -> None:
    first = workload.random_prompts(3, 4, 50, seed=1)
    assert first == workload.random_prompts(3, 4, 50, seed=1)
    assert first != workload.random_prompts(3, 4, 50, seed=2)
    times = workload.arrivals(500, 10.0, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50.0, rel=0.25)
    path = tmp_path / "prompts"
    path.write_text('plain\n"quoted"\n{"prompt": "p"}\n{"prompt_token_ids": [1, 2]}\n\n')
    assert workload.prompts_from_file(str(path), 5) == ["plain", "quoted", "p", [1, 2], "plain"]


def test_memory_of_processes() -> None:
    assert report.pss_bytes([os.getpid()]) > 1 << 20
    assert report.pss_bytes([2**22 + 1]) == 0
    with report.MemoryWatch(lambda: [os.getpid()], interval_s=0.01) as watch:
        assert watch.take_peak() > 1 << 20


def test_ports_are_checked_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--port", "0", "--rpc-port", port]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
