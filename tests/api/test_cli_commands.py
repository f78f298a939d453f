"""Commands end to end: generate and serve as processes, chat, status and bench against a server."""

import argparse
import io
import json
import os
import re
import shutil
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

from coterie.errors import ConfigError
from coterie.runtime import model_store
from coterie.runtime.api import cli, cli_chat
from coterie.runtime.bench import report, workload
from coterie.runtime.bench.load import Record
from coterie.runtime.engine.plan import make_plan
from coterie.runtime.engine_args import engine_config_from_flags

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


def test_generate_checks_ids_before_loading(
    tiny_model_dir: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model_dir("mixtral"))
    for flags, says in (
        (["--prompt-token-ids=-1,2"], "--prompt-token-ids must be between 0 and 260, got -1"),
        (["--prompt-token-ids", "1,261"], "--prompt-token-ids must be between 0 and 260, got 261"),
        (["--prompt", "x", "--stop-token-ids", "300"], "stop_token_ids must be between 0 and 260"),
    ):
        assert cli.main(["generate", model, *ONE_RANK, *flags]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert [line.startswith("coterie: error: ") for line in err.splitlines()] == [True]
        assert says in err


def test_dummy_weights_need_config_json_alone(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = (tiny_model_dir("mixtral") / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    command = ["generate", str(tmp_path), *ONE_RANK, "--load-format", "dummy", "--json"]
    command += ["--max-tokens", "3", "--ignore-eos"]
    assert cli.main([*command, "--prompt-token-ids", "1,2,3"]) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["token_ids"]) == 3
    assert err.count("only token ids are served") <= 1, "0 where a test run configures logging"
    chat = ["chat", str(tmp_path), *ONE_RANK, "--load-format", "dummy"]
    stop = [*command, "--prompt-token-ids", "1", "--stop", "x"]
    for refused in ([*command, "--prompt", "x"], stop, chat):
        assert cli.main(refused) == 2
        out, err = capfd.readouterr()
        assert (out, len(err.splitlines())) == ("", 1), "before anything is loaded"
        assert "tokenizer" in err


@pytest.mark.parametrize("fault", ["none", "broken", "settings", "folder"])
def test_a_tokenizer_that_cannot_work_is_found_before_ranks_start(
    tiny_model_dir: Callable[..., Path],
    write_byte_tokenizer: Callable[..., Path],
    tmp_path: Path,
    fault: str,
) -> None:
    if fault != "none":
        write_byte_tokenizer(tmp_path)
    if fault == "broken":
        (tmp_path / "tokenizer.json").write_text('{"model": ')
    if fault == "settings":
        (tmp_path / "tokenizer_config.json").write_text("[]")
    folder = tmp_path / "nowhere" if fault == "folder" else tmp_path
    config = engine_config_from_flags(model=tiny_model_dir("mixtral"), tokenizer=str(folder))
    with pytest.raises(ConfigError, match=re.escape(str(folder))):
        make_plan(config)


def test_a_tokenizer_goes_by_a_pulled_name(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model_dir("mixtral")
    config = engine_config_from_flags(model=model, tokenizer="smollm2-moe")
    with pytest.raises(ConfigError, match="coterie pull"):
        make_plan(config)
    root = model_store.cache_dir()
    root.mkdir(parents=True)
    with model_store.replaced_folder(root, "smollm2-moe") as made:
        shutil.copytree(model, made, dirs_exist_ok=True)
    assert make_plan(config).tokenizer_dir == root / "smollm2-moe"


def test_chat_without_a_server_starts_an_engine(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr(cli_chat, "DEFAULT_URL", url)
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        own = argparse.Namespace(started=0)

        async def start(*_: Any) -> None:
            own.started += 1

        monkeypatch.setattr(cli_chat, "_ask_own_engine", start)
        assert cli.main(["chat"]) == 0
        assert own.started == 1
        out, err = capfd.readouterr()
        assert out == ""
        assert url in err
        assert "engine of its own" in err
        # Named, or with its key: then it is that server or nothing.
        for place in (["--url", url], ["--api-key", "k"], ["--rpc", url.removeprefix("http://")]):
            assert cli.main(["chat", *place]) == 1
            out, err = capfd.readouterr()
            assert (out, own.started) == ("", 1)
            assert err.startswith("coterie: error: ")
        assert cli.main(["chat", "--max-num-seqs", "4"]) == 0
        assert own.started == 2


def test_chat_failing_at_a_line_leaves_stdout_clean(
    scripted_server: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert cli.main(["chat", "--url", scripted_server.url, "--max-tokens", "99999"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 5000 + "\n"))
    capfd.readouterr()
    assert cli.main(["chat", "--url", f"{scripted_server.url}/v1"]) == 1
    assert capfd.readouterr().out == ""


def test_serve_says_why_the_engine_died(
    tiny_model_dir: Callable[..., Path], until: Callable[..., None]
) -> None:
    command = [
        *(*COTERIE, "serve", str(tiny_model_dir("mixtral")), *ONE_RANK),
        *("--port", "0", "--rpc-port", "0", "--shutdown-timeout-s", "5"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        watchdog = threading.Timer(100, p.kill)
        watchdog.start()
        try:
            assert p.stdout is not None
            ready = p.stdout.readline()
            assert ready.startswith("Coterie is ready: "), p.stderr and p.stderr.read()
            url = re.search(r"http://\S+", ready)[0]  # type: ignore[index]
            os.kill(
                httpx.get(f"{url}/status", timeout=20).json()["ranks"][0]["pid"], signal.SIGKILL
            )
            _, err = p.communicate(timeout=60)
        finally:
            watchdog.cancel()
            p.kill()
    last = err.strip().splitlines()[-1]
    assert p.returncode == 1
    assert last.startswith("coterie: error: engine died: "), err
    assert "rank 0" in last
    assert "Ctrl-C" not in err
    assert "Traceback" not in err


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
    out, err = capsys.readouterr()
    assert "output tok/s" in out
    for suffix in (".json", ".png"):
        assert f"wrote {base}{suffix}" in err
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
