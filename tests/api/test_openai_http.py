"""The unmodified ``openai`` package against a real engine: a tiny model on rank processes."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from coterie.runtime.api.client import Client
from coterie.runtime.engine.engine import AsyncEngine
from coterie.runtime.engine_args import engine_config_from_flags

MODEL = "tiny"
PROMPT = "the quick brown fox"
USER: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Any], server_over: Callable[..., Any]) -> Iterator[Any]:
    config = engine_config_from_flags(
        model=str(tiny_model_dir("mixtral")),
        served_model_name=MODEL,
        max_model_len=256,
        num_kv_blocks=128,
        max_num_seqs=16,
        max_waiting=32,
        kernels="torch",
        attention_ranks=1,
        distributed_executor_backend="mp",
    )

    async def start() -> AsyncEngine:
        return await AsyncEngine.start(config)

    with server_over(start) as server:
        yield server


@pytest.fixture(scope="module")
def sdk(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


def test_chat_stream_equals_whole(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": USER,
        "temperature": 0,
        "max_tokens": 24,
        "extra_body": {"ignore_eos": True},
    }
    whole = sdk.chat.completions.create(**options)
    stream = sdk.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length" == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == 24 == chunks[-1].usage.completion_tokens
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens


def test_stop_strings(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
    free = sdk.completions.create(**options, max_tokens=32, extra_body={"ignore_eos": True})
    text = free.choices[0].text
    stop = text[8:11]
    whole = sdk.completions.create(**options, max_tokens=32, stop=stop)
    streamed = sdk.completions.create(**options, max_tokens=32, stop=stop, stream=True)
    assert whole.choices[0].text == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_seeded_n_and_logprobs(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 1.0,
        "seed": 7,
        "n": 3,
        "max_tokens": 12,
        "logprobs": 2,
    }
    first = sdk.completions.create(**options)
    again = sdk.completions.create(**options)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    for choice in first.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)
        assert choice.logprobs.top_logprobs is not None
        assert all(1 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)


def test_errors_of_the_engine(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.completions.create(model=MODEL, prompt="x" * 300)
    assert "maximum context length is 256 tokens" in str(too_long.value)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    for call in (
        lambda: sdk.completions.create(model=MODEL, prompt="x", max_tokens=256),
        lambda: sdk.chat.completions.create(model=MODEL, messages=USER, max_tokens=256),
        lambda: sdk.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=999),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as cut:
            call()
        assert (cut.value.code, cut.value.param) == ("context_length_exceeded", "max_tokens")
    fits = sdk.completions.create(model=MODEL, prompt="x" * 250, extra_body={"ignore_eos": True})
    assert fits.usage is not None
    assert fits.usage.total_tokens == 256, "the default gives way to the prompt"
    with pytest.raises(openai.BadRequestError):
        sdk.completions.create(model=MODEL, prompt=[100_000])
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="other", prompt="x")
    with pytest.raises(openai.RateLimitError) as full:
        sdk.completions.create(model=MODEL, prompt="x", n=100)
    assert int(full.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.InternalServerError) as late:
        sdk.completions.create(
            model=MODEL, prompt="x", max_tokens=200, extra_body={"deadline_s": 0.001}
        )
    assert late.value.status_code == 504


def test_a_client_that_leaves_gives_its_blocks_back(
    sdk: openai.OpenAI, server: Any, until: Callable[..., None]
) -> None:
    with Client(port=server.rpc_port, timeout_s=20) as client:
        aborted = client.status()["requests"]["aborted"]
        stream = sdk.completions.create(
            model=MODEL,
            prompt="gone soon",
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
        until(lambda: client.status()["requests"]["aborted"] == aborted + 1)

        def all_free() -> bool:
            status = client.status()
            ranks = [rank for rank in status["ranks"] if "attention" in rank["roles"]]
            free = all(rank["kv_blocks_free"] == rank["kv_blocks_total"] for rank in ranks)
            return free and status["requests"]["running"] == 0

        until(all_free)


async def test_many_at_once(server: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
        alone = await client.completions.create(**options, prompt="prompt 3")
        answers = await asyncio.gather(
            *(client.completions.create(**options, prompt=f"prompt {i}") for i in range(24))
        )
    assert answers[3].choices[0].text == alone.choices[0].text


def test_every_metric_is_described(server: Any, sdk: openai.OpenAI) -> None:
    sdk.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    assert "_created" not in text
    helps = [line.split(" ", 3) for line in text.splitlines() if line.startswith("# HELP ")]
    bare = [name for _, _, name, said in helps if not (said.endswith(".") and " " in said)]
    assert len(helps) > 30
    assert bare == []


def test_rpc_and_http_agree(sdk: openai.OpenAI, server: Any) -> None:
    over_http = sdk.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8)
    with Client(port=server.rpc_port, timeout_s=20) as client:
        over_rpc = client.generate(PROMPT, temperature=0, max_tokens=8)
        assert over_rpc.text == over_http.choices[0].text
        status = client.status()
        assert status.keys() >= {"epoch", "layout", "ranks", "requests"}
        assert client.health()["ready"]
