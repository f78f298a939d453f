"""Ranks as Ray actors: two deployments side by side, and what is left of them afterwards."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from coterie.errors import EngineDead, PlacementError
from coterie.runtime.cluster.ray_head import RayHead, authentication, end_session
from coterie.runtime.engine.engine import AsyncEngine
from coterie.runtime.engine_args import engine_config_from_flags
from coterie.runtime.request import GenerateRequest, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")
GRACE_S = 3.0
WAIT_S = 30.0

KILLED_ENGINE = """
import asyncio, json, sys
from coterie.runtime.engine.engine import AsyncEngine
from coterie.runtime.engine_args import engine_config_from_flags

async def main():
    engine = await AsyncEngine.start(engine_config_from_flags(**json.loads(sys.argv[1])))
    folder = str(engine._deployment.folder)
    print(json.dumps({"status": await engine.status(), "folder": folder}), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def _tree(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if p.is_running()]


async def _greedy(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    request = GenerateRequest(
        request_id=f"r{prompt}",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    )
    async with asyncio.timeout(WAIT_S):
        return [t async for output in await engine.submit(request) for t in output.token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model_dir: Callable[..., Path]) -> AsyncIterator[AsyncEngine]:
    config = engine_config_from_flags(
        model=tiny_model_dir("mixtral"),
        distributed_executor_backend="ray",
        data_parallel_size=2,
        num_kv_blocks=64,
    )
    running = await AsyncEngine.start(config)
    processes = _tree(os.getpid())
    folder = running._deployment.folder
    yield running
    await running.shutdown(10.0)
    _, left = psutil.wait_procs(processes, timeout=5.0)
    assert not left
    assert not folder.exists()


async def test_ranks_are_actors_of_an_own_ray(engine: AsyncEngine) -> None:
    status = await engine.status()
    assert len(status["ranks"]) == 2
    for rank in status["ranks"]:
        assert "ray::Rank" in " ".join(psutil.Process(rank["pid"]).cmdline())
    assert len(await _greedy(engine, [1, 2, 3])) == 8
    # The engine's own process stays free of Ray.
    assert "ray" not in sys.modules


async def test_nothing_listens_beyond_this_host(engine: AsyncEngine) -> None:
    listening = [
        (process.name(), connection.laddr.ip)
        for process in [psutil.Process(), *_tree(os.getpid())]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 2  # Ray's own
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}, listening


async def test_a_dead_actor_is_named_with_its_log(
    tiny_model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config_from_flags(
        model=tiny_model_dir("llama"), data_parallel_size=1, num_kv_blocks=64
    )
    engine = await AsyncEngine.start(config)
    try:
        (rank,) = (await engine.status())["ranks"]
        # An abort that leaves its reason in the log, as a failed assertion in native code does.
        os.kill(rank["pid"], signal.SIGABRT)
        async with asyncio.timeout(WAIT_S):
            while engine.health()["live"]:
                await asyncio.sleep(0.05)
        with pytest.raises(EngineDead, match="rank 0 died: "):
            await _greedy(engine, [1])
    finally:
        await engine.shutdown(5.0)
    text = caplog.text
    assert f"lost rank 0 (pid {rank['pid']}, step 0, epoch 1): rank 0 died: actor died" in text
    assert "its log ends:" in text
    assert "Fatal Python error: Aborted" in text or "SIGABRT" in text


async def test_a_second_deployment_and_its_violent_end(
    engine: AsyncEngine, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Another engine process with 4 ranks on 2 cores is killed: all of it ends within the grace,
    and the first deployment does not notice."""
    before = await _greedy(engine, [4, 5])
    shm = set(os.listdir("/dev/shm"))
    flags = {
        "model": str(tiny_model_dir("mixtral")),
        "distributed_executor_backend": "ray",
        "attention_ranks": 2,
        "expert_ranks": 2,
        "disaggregate": True,
        "num_kv_blocks": 64,
        "orphan_grace_s": GRACE_S,
    }
    with open(tmp_path / "stderr", "wb") as stderr:
        other = subprocess.Popen(
            [sys.executable, "-c", KILLED_ENGINE, json.dumps(flags)],
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert other.stdout is not None
    try:
        line = await asyncio.wait_for(asyncio.to_thread(other.stdout.readline), 90.0)
        assert line, (tmp_path / "stderr").read_text()
        report = json.loads(line)
        processes = _tree(other.pid)
        pids = {rank["pid"] for rank in report["status"]["ranks"]}
        assert len(pids) == 4
        assert pids <= {process.pid for process in processes}
        assert Path(report["folder"]).exists()
    finally:
        other.kill()
        other.wait(10.0)
        other.stdout.close()
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, timeout=GRACE_S + 9.0)
    assert not left
    assert not Path(report["folder"]).exists()
    assert set(os.listdir("/dev/shm")) <= shm
    assert await _greedy(engine, [4, 5]) == before


@pytest.mark.slow
async def test_a_foreign_cluster_is_used_and_left_alone(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path("/tmp", f"coterie-test-{os.getpid()}")
    folder.mkdir(mode=0o700)
    for name, value in authentication(folder).items():
        monkeypatch.setenv(name, value)
    # A session of its own for the head, as a cluster of others has.
    head = RayHead(folder / "ray", num_cpus=1, new_session=True, loopback=False)
    try:
        head.start()
        address = await asyncio.to_thread(head.address)
        config = engine_config_from_flags(
            model=tiny_model_dir("llama"),
            data_parallel_size=2,
            num_kv_blocks=64,
            ray_address=address,
        )
        engine = await AsyncEngine.start(config)
        ranks = [psutil.Process(rank["pid"]) for rank in (await engine.status())["ranks"]]
        assert len(await _greedy(engine, [1, 2])) == 8
        await engine.shutdown(10.0)
        _, left = psutil.wait_procs(ranks, timeout=10.0)
        assert not left
        assert head.pid is not None
        assert psutil.pid_exists(head.pid)
    finally:
        if head.pid is not None:
            await asyncio.to_thread(end_session, head.pid)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


async def test_no_cluster_at_the_address(tiny_model_dir: Callable[..., Path]) -> None:
    config = engine_config_from_flags(
        model=tiny_model_dir("llama"),
        data_parallel_size=1,
        ray_address="127.0.0.1:1",
    )
    with pytest.raises(PlacementError, match="no Ray cluster answers at 127.0.0.1:1"):
        await AsyncEngine.start(config)
