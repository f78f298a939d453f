"""Ranks that die, hang or never start: who is blamed, who fails and who does not."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError, EngineDead, PlacementError, RankDied
from coterie.runtime.cluster.process_launcher import ProcessLauncher
from coterie.runtime.engine.engine import AsyncEngine
from coterie.runtime.engine.plan import make_plan
from coterie.runtime.engine.request_stream import RequestStream
from coterie.runtime.engine_args import engine_config_from_flags
from coterie.runtime.request import GenerateRequest, SamplingParams

WAIT_S = 30.0
TinyModelDir = Callable[..., Path]


@asynccontextmanager
async def _engine(model_dir: Path, **flags: Any) -> AsyncIterator[AsyncEngine]:
    config = engine_config_from_flags(
        model=model_dir,
        distributed_executor_backend="mp",
        skip_tokenizer_init=True,
        num_kv_blocks=256,
        **flags,
    )
    engine = await AsyncEngine.start(config)
    try:
        yield engine
    finally:
        await engine.shutdown(5.0)


async def _submit(engine: AsyncEngine, name: str, max_tokens: int) -> RequestStream:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    return await engine.submit(
        GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling_params=params)
    )


async def _count(stream: RequestStream) -> int:
    async with asyncio.timeout(WAIT_S):
        return sum([len(output.token_ids) async for output in stream])


async def _pid(engine: AsyncEngine, seat: int) -> int:
    pid: int = (await engine.status())["ranks"][seat]["pid"]
    return pid


async def test_a_dead_attention_rank_fails_its_own_requests_only(
    tiny_model_dir: TinyModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"attention_ranks": 2, "expert_ranks": 1}
    async with _engine(tiny_model_dir("mixtral"), **flags) as engine:
        streams = [await _submit(engine, f"s{seat}", 500) for seat in (0, 1)]
        async with asyncio.timeout(WAIT_S):
            for stream in streams:
                await anext(stream)
        pid = await _pid(engine, 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankDied, match="rank 1 died: process ended with signal SIGKILL"):
            await _count(streams[1])
        assert await _count(streams[0]) > 0
        assert streams[0].ended
        assert engine.health()["live"]
        assert await _count(await _submit(engine, "after", 8)) == 8
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors[0].startswith(f"lost rank 1 (pid {pid}, step ")
    assert ", epoch 1): rank 1 died: process ended with signal SIGKILL" in errors[0]
    assert errors[1:] == ["1 requests were on rank 1 and fail"]


async def test_a_frozen_expert_rank_is_blamed_and_not_who_reports_it(
    tiny_model_dir: TinyModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"attention_ranks": 1, "expert_ranks": 1, "disaggregate": True, "fault_s": 1.0}
    async with _engine(tiny_model_dir("mixtral"), **flags) as engine:
        stream = await _submit(engine, "s", 500)
        async with asyncio.timeout(WAIT_S):
            await anext(stream)
        os.kill(await _pid(engine, 1), signal.SIGSTOP)
        with pytest.raises(RankDied, match="rank 1 is silent for"):
            await _count(stream)
        health = engine.health()
        assert not health["live"]
        assert [rank["state"] == "dead" for rank in health["ranks"]] == [False, True]
        with pytest.raises(EngineDead, match="rank 1 is silent"):
            await _submit(engine, "after", 8)
    text = caplog.text
    assert "a rank was reported dead by rank 0" in text
    assert "lost rank 1" in text
    assert "without rank 1 the engine stops: 1 requests" in text


async def test_a_rank_that_dies_at_start_says_why(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rank.py").write_text("raise SystemExit('the disk is on fire')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = engine_config_from_flags(model=tiny_model_dir("llama"), data_parallel_size=2)
    specs = make_plan(config).specs("test", tmp_path, b"t" * 32)
    launcher = ProcessLauncher("broken_rank")
    notices: list[tuple[int, str]] = []
    both = asyncio.Event()

    def on_death(seat: int, reason: str) -> None:
        notices.append((seat, reason))
        if len(notices) == 2:
            both.set()

    try:
        with pytest.raises(PlacementError, match=r"rank \d did not start\nits log ends:\nthe disk"):
            await launcher.start(specs, on_death, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await both.wait()
    finally:
        await launcher.stop(0.0)
    assert {reason.splitlines()[0] for _, reason in notices} == {"process ended with exit code 1"}


async def test_a_start_that_is_given_up_is_quiet(
    tiny_model_dir: TinyModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No task or future of the start is left behind for the event loop to complain about."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model_dir / name).symlink_to(tiny_model_dir("llama") / name)
    config = engine_config_from_flags(
        model=model_dir, distributed_executor_backend="mp", data_parallel_size=2
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await AsyncEngine.start(config)
    starting = asyncio.create_task(AsyncEngine.start(config))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting], timeout=WAIT_S)
    assert starting.cancelled()
    del starting
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert "destroyed" not in caplog.text
    assert asyncio.all_tasks() == {asyncio.current_task()}
