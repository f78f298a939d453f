"""The engine with real rank processes: a tiny MoE on two colocated ranks, a tiny dense model."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from coterie.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    QueueFull,
    RankDied,
)
from coterie.runtime.engine.engine import AsyncEngine
from coterie.runtime.engine_args import engine_config_from_flags
from coterie.runtime.request import GenerateRequest, RequestOutput, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model_dir: Callable[..., Path]) -> AsyncIterator[AsyncEngine]:
    config = engine_config_from_flags(
        model=tiny_model_dir("mixtral"),
        distributed_executor_backend="mp",
        data_parallel_size=2,
        num_kv_blocks=64,
        block_size=4,
        max_num_seqs=4,
        max_waiting=6,
    )
    running = await AsyncEngine.start(config)
    ranks = [psutil.Process(rank["pid"]) for rank in (await running.status())["ranks"]]
    yield running
    await running.shutdown(10.0)
    assert not any(rank.is_running() for rank in ranks)
    assert not Path(running._deployment.folder).exists()


def _request(name: str, prompt: Any = "abc", **params: Any) -> GenerateRequest:
    text = prompt if isinstance(prompt, str) else None
    deadline_s = params.pop("deadline_s", None)
    return GenerateRequest(
        request_id=name,
        prompt=text,
        prompt_token_ids=None if text is not None else prompt,
        sampling_params=SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | params)),
        deadline_s=deadline_s,
    )


async def _run(engine: AsyncEngine, request: GenerateRequest) -> dict[int, list[RequestOutput]]:
    """All outputs by choice."""
    found: dict[int, list[RequestOutput]] = {}
    async with asyncio.timeout(WAIT_S):
        async for output in await engine.submit(request):
            found.setdefault(output.index, []).append(output)
    return found


def _ids(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def _text(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


async def _blocks(engine: AsyncEngine) -> list[tuple[int, int]]:
    ranks = (await engine.status())["ranks"]
    return [(rank["kv_blocks_free"], rank["kv_blocks_total"]) for rank in ranks]


async def test_greedy_is_the_same_alone_and_in_a_crowd(engine: AsyncEngine) -> None:
    alone = (await _run(engine, _request("alone", temperature=0)))[0]
    crowd = await asyncio.gather(
        *(_run(engine, _request(f"crowd-{i}", temperature=0)) for i in range(6))
    )
    assert len(_ids(alone)) == 8
    assert alone[-1].finish_reason == "length"
    assert alone[0].prompt_token_ids == [97, 98, 99]
    assert all(_ids(one[0]) == _ids(alone) for one in crowd)
    assert await _blocks(engine) == [(64, 64), (64, 64)]


async def test_choices_differ_and_a_seed_repeats_them(engine: AsyncEngine) -> None:
    first = await _run(engine, _request("seeded-1", n=3, seed=7, max_tokens=12))
    second = await _run(engine, _request("seeded-2", n=3, seed=7, max_tokens=12))
    assert sorted(first) == [0, 1, 2]
    assert {i: _ids(o) for i, o in first.items()} == {i: _ids(o) for i, o in second.items()}
    assert len({tuple(_ids(outputs)) for outputs in first.values()}) > 1


async def test_stop_string_ends_the_choice_on_its_rank_too(engine: AsyncEngine) -> None:
    prompt = [10, 20, 30]
    whole = (await _run(engine, _request("whole", prompt, temperature=0, max_tokens=40)))[0]
    text = _text(whole)
    # A readable character somewhere in the middle of what greedy decoding says.
    stop = next(char for char in text[2:] if char.isascii() and char not in text[:2])
    cut = (await _run(engine, _request("cut", prompt, temperature=0, max_tokens=40, stop=(stop,))))[
        0
    ]
    assert (cut[-1].finish_reason, cut[-1].stop_reason) == ("stop", stop)
    assert _text(cut) == text[: text.index(stop)]
    assert _ids(cut) == _ids(whole)[: len(_ids(cut))]
    status = await engine.status()
    assert status["requests"]["running"] == 0
    assert await _blocks(engine) == [(64, 64), (64, 64)]


async def test_closing_a_stream_gives_the_blocks_back(engine: AsyncEngine) -> None:
    aborted = (await engine.status())["requests"]["aborted"]
    stream = await engine.submit(_request("closed", max_tokens=200, n=2))
    async with asyncio.timeout(WAIT_S):
        await anext(stream)
    await stream.aclose()
    assert await _blocks(engine) == [(64, 64), (64, 64)]
    requests = (await engine.status())["requests"]
    assert (requests["running"], requests["aborted"]) == (0, aborted + 1)


async def test_abort_and_deadline_raise_in_the_stream(engine: AsyncEngine) -> None:
    stream = await engine.submit(_request("aborted", max_tokens=200))
    await engine.abort("aborted")
    await engine.abort("never-heard-of")
    with pytest.raises(Cancelled, match="aborted"):
        async for _ in stream:
            pass
    with pytest.raises(DeadlineExceeded):
        await _run(engine, _request("late", max_tokens=200, deadline_s=0.0))


async def test_what_can_never_run_is_refused_at_once(engine: AsyncEngine) -> None:
    for request, words in (
        (_request("r", [1] * 256), "KV cache of a rank holds 256 tokens"),
        (_request("r", [1] * 600), "maximum context length is 512 tokens"),
        (_request("r", [1, 999]), "must be between 0 and 260, got 999"),
        (_request("r", []), "no tokens"),
        (_request("r", temperature=-1.0), "temperature must be"),
        (GenerateRequest(request_id="r"), "give a prompt"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await engine.submit(request)
    stream = await engine.submit(_request("twice", max_tokens=100))
    with pytest.raises(InvalidRequest, match="in use"):
        await engine.submit(_request("twice"))
    await stream.aclose()


async def test_output_ends_where_the_cache_ends(engine: AsyncEngine) -> None:
    outputs = (await _run(engine, _request("long", [5] * 250, max_tokens=None)))[0]
    assert len(_ids(outputs)) == 6
    assert outputs[-1].finish_reason == "length"


async def test_a_full_queue_refuses_and_everything_admitted_finishes(engine: AsyncEngine) -> None:
    """2 ranks x 4 running + 6 waiting: the fifteenth has to come back later."""
    streams = [await engine.submit(_request(f"q{i}", max_tokens=60)) for i in range(14)]
    with pytest.raises(QueueFull) as info:
        await engine.submit(_request("q14"))
    assert info.value.retry_after_s > 0
    assert engine.counters()["requests_waiting"] == 6.0
    async with asyncio.timeout(WAIT_S):
        for stream in streams:
            outputs = [output async for output in stream]
            assert len(_ids(outputs)) == 60
    assert await _blocks(engine) == [(64, 64), (64, 64)]


async def test_status_and_counters_have_the_agreed_shape(engine: AsyncEngine) -> None:
    status = await engine.status()
    assert set(status) == {"epoch", "layout", "ranks", "requests"}
    rank = status["ranks"][1]
    assert set(rank) == {
        *("seat", "roles", "pid", "node", "state", "step", "last_commit_age_s"),
        *("kv_blocks_free", "kv_blocks_total", "experts"),
    }
    assert rank["roles"] == ["attention", "experts"]
    assert rank["experts"]["physical_ids"] == [2, 3]
    assert set(status["requests"]) == {"running", "waiting", "finished", "aborted"}
    health = engine.health()
    assert health["live"]
    assert health["ready"]
    counters = engine.counters()
    by_seat = counters["kv_blocks_free"]
    assert isinstance(by_seat, dict)
    assert set(by_seat) == {0, 1}


async def test_a_dead_replica_fails_its_own_requests_only(
    tiny_model_dir: Callable[..., Path],
) -> None:
    config = engine_config_from_flags(
        model=tiny_model_dir("llama"),
        distributed_executor_backend="mp",
        data_parallel_size=2,
        num_kv_blocks=256,
    )
    engine = await AsyncEngine.start(config)
    try:
        streams = [await engine.submit(_request(f"s{i}", max_tokens=500)) for i in range(2)]
        async with asyncio.timeout(WAIT_S):
            for stream in streams:
                await anext(stream)
            victim = (await engine.status())["ranks"][1]
            os.kill(victim["pid"], signal.SIGKILL)
            with pytest.raises(RankDied, match="rank 1 died: process ended with signal SIGKILL"):
                async for _ in streams[1]:
                    pass
            await streams[0].aclose()
        assert len(_ids((await _run(engine, _request("after")))[0])) == 8
        assert [rank["error"] is None for rank in engine.health()["ranks"]] == [True, False]
        assert (await engine.status())["ranks"][1]["state"] == "dead"
    finally:
        await engine.shutdown(10.0)
    with pytest.raises(EngineDead):
        await engine.submit(_request("too-late"))


def _children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "rank.main" in " ".join(child.cmdline())
    ]


async def test_a_start_that_fails_leaves_nothing(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, engine: AsyncEngine
) -> None:
    """First before any process (a missing tensor file), then while ranks are starting."""
    before = len(_children())
    broken = tmp_path / "broken"
    broken.mkdir()
    good = tiny_model_dir("llama")
    for name in ("config.json", "model.safetensors"):
        (broken / name).symlink_to(good / name)
    flags = {"distributed_executor_backend": "mp", "data_parallel_size": 1}
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await AsyncEngine.start(engine_config_from_flags(model=broken, **flags))
    (broken / "model.safetensors").unlink()
    with pytest.raises(ConfigError):
        await AsyncEngine.start(engine_config_from_flags(model=broken, **flags))
    assert len(_children()) == before
