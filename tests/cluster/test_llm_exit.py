"""A script that never shuts its LLM down: the process ends as it should, and so do its ranks."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import json, sys, threading
import coterie

model, how = sys.argv[1:]
llm = coterie.LLM(model, data_parallel_size=1, num_kv_blocks=64, skip_tokenizer_init=True)
params = coterie.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def generate():
    return llm.generate([[1, 2, 3]] * 4, params)


(rank,) = llm._thread.run(llm.engine.status())["ranks"]
report = {"pid": rank["pid"], "folder": str(llm.engine._deployment.folder)}
print(json.dumps(report), flush=True)
if how == "daemon-thread":  # still generating when the script is over
    def endless():
        while True:
            generate()
    threading.Thread(target=endless, daemon=True).start()
elif how == "thread":  # which the interpreter waits for
    def later():
        threading.main_thread().join()
        print(len(generate()), flush=True)
    threading.Thread(target=later).start()
elif how == "dropped":
    generate()
    del llm
elif how == "fork":
    import os
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    print(len(generate()), flush=True)
else:
    generate()
    if how == "raises":
        raise ZeroDivisionError
    if how == "exits":
        sys.exit(3)
"""
CODES = {"raises": 1, "exits": 3}
TIMEOUT_S = 100.0


def _run_together(ways: list[str], model_dir: Path, tmp_path: Path) -> None:
    processes = []
    for number, how in enumerate(ways):
        with open(tmp_path / f"{number}.err", "wb") as stderr:
            command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT, str(model_dir), how]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr))
    for number, (how, process) in enumerate(zip(ways, processes, strict=True)):
        out, _ = process.communicate(timeout=TIMEOUT_S)
        errors = (tmp_path / f"{number}.err").read_text()
        assert process.returncode == CODES.get(how, 0), (how, errors)
        first, *rest = out.decode().splitlines()
        report = json.loads(first)
        assert not psutil.pid_exists(report["pid"]), how
        assert not Path(report["folder"]).exists(), how
        assert rest == (["4"] if how in ("thread", "fork") else []), how
        if how == "raises":
            assert "ZeroDivisionError" in errors
        elif how != "daemon-thread":  # which may live to hear that its engine is gone
            assert not errors, (how, errors)


def test_scripts_without_shutdown(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    _run_together(["plain", "daemon-thread", "plain", "exits"], tiny_model_dir("llama"), tmp_path)


@pytest.mark.slow
def test_other_ways_to_end(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    ways = ["raises", "thread", "dropped", "fork", *["plain"] * 8]
    for start in range(0, len(ways), 4):
        _run_together(ways[start : start + 4], tiny_model_dir("llama"), tmp_path)
