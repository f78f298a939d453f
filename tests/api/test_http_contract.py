"""The HTTP contract over a scripted engine: bodies, errors, streams, disconnects, operations."""

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from coterie.router.counters import RouterCounters
from coterie.runtime.metrics import HELP

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def http(scripted_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(scripted_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{scripted_server.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


def events(reply: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_openai_completion_defaults(sdk: openai.OpenAI) -> None:
    done = sdk.completions.create(model="scripted", prompt="hello")
    choice = done.choices[0]
    assert choice.text == "hellohellohelloh"
    assert choice.finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 16)
    assert done.usage.total_tokens == 21


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "xy"], ["aba", "xyx"]),
        ([97, 98], ["aba"]),
        ([[97, 98], [120, 121]], ["aba", "xyx"]),
    ],
)
def test_prompt_forms(sdk: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    done = sdk.completions.create(model="scripted", prompt=prompt, max_tokens=3)
    assert [choice.text for choice in done.choices] == texts
    assert [choice.index for choice in done.choices] == list(range(len(texts)))


def test_n_choices_of_several_prompts(sdk: openai.OpenAI) -> None:
    done = sdk.completions.create(model="scripted", prompt=["ab", "xy"], max_tokens=2, n=2)
    assert [choice.text for choice in done.choices] == ["ab", "ba", "xy", "yx"]
    assert done.usage is not None
    assert done.usage.prompt_tokens == 4, "a prompt counts once"
    assert done.usage.completion_tokens == 8


def test_echo_stream_and_whole_agree(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "scripted", "prompt": ["ab", "h\u00e9"], "max_tokens": 7}
    whole = sdk.completions.create(**options, echo=True, n=2)
    texts = [""] * 4
    for chunk in sdk.completions.create(**options, echo=True, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] == "ab" + "abababa"


def test_completion_logprobs(sdk: openai.OpenAI) -> None:
    done = sdk.completions.create(model="scripted", prompt="ab", max_tokens=3, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "a"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5, "\x00": -2.0}
    assert logprobs.text_offset == [0, 1, 2]


def test_chat(sdk: openai.OpenAI) -> None:
    done = sdk.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=1,
    )
    choice = done.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "system\nd\n"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.bytes, len(first.top_logprobs)) == ("s", [115], 1)


def test_chat_is_limited_by_the_model_alone(http: httpx.Client, scripted_server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    done = http.post("/v1/chat/completions", json=body).json()
    assert done["usage"]["total_tokens"] == scripted_server.engine.max_model_len


def test_chat_stream_order(http: httpx.Client) -> None:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    chunks = events(reply)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in range(2):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        assert own[-1]["finish_reason"] == "length"
        assert all(choice["finish_reason"] is None for choice in own[:-1])
        assert len(own) == 5


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_so_far_on_every_chunk(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"prompt": "x"} if path == "completions" else CHAT
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"max_tokens": 3, "stream": True, "stream_options": options}
    chunks = events(http.post(f"/v1/{path}", json=body | more))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_stop_string_stream_and_whole(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "scripted", "prompt": "one two ", "max_tokens": 64}
    whole = sdk.completions.create(**options, stop=["two o", "zzz"])
    chunks = list(sdk.completions.create(**options, stop=["two o", "zzz"], stream=True))
    assert whole.choices[0].text == "one " == "".join(c.choices[0].text for c in chunks)
    assert whole.choices[0].finish_reason == "stop" == chunks[-1].choices[0].finish_reason
    kept = sdk.completions.create(
        **options, stop="two o", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "one two o"


def test_return_token_ids(http: httpx.Client) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [97, 98])


def test_statuses_of_errors(http: httpx.Client, sdk: openai.OpenAI) -> None:
    def post(prompt: str, **more: Any) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": prompt} | more)

    full = post("full")
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    assert post("dead").status_code == 503
    assert post("late").status_code == 504
    assert post("late", stream=True).status_code == 504, "nothing was sent yet"
    assert post("x", model="other").status_code == 404
    assert http.post("/v1/completions", content=b"x" * (2 << 20)).status_code in (400, 413)
    large = {"content-type": "application/json"}
    assert http.post("/v1/completions", content=b"x" * (2 << 20), headers=large).status_code == 413
    assert http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/completions").status_code == 405
    with pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="scripted", prompt="full")
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        sdk.completions.create(model="scripted", prompt="x", temperature=-1)


def test_one_full_prompt_refuses_the_whole_list(http: httpx.Client, scripted_server: Any) -> None:
    reply = http.post("/v1/completions", json={"prompt": ["hang", "full"]})
    assert reply.status_code == 429
    scripted_server.engine.wait_idle()


def test_error_in_the_middle_of_a_stream(sdk: openai.OpenAI) -> None:
    chunks = sdk.completions.create(model="scripted", prompt="break", stream=True)
    assert [next(chunks).choices[0].text for _ in range(2)] == ["b", "r"]
    with pytest.raises(openai.APIError, match="the deadline passed"):
        next(chunks)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["hang", ["hang", "hang up"]])
def test_disconnect_aborts(scripted_server: Any, stream: bool, prompt: Any) -> None:
    engine = scripted_server.engine
    before = len(engine.aborted)
    body = json.dumps({"prompt": prompt, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", scripted_server.http_port), 10) as sock:
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        if stream:
            assert sock.recv(100)
        count = 2 if isinstance(prompt, list) else 1
        wait_for_open(engine, count)
    engine.wait_idle()
    assert len(engine.aborted) == before + count


def test_a_client_that_leaves_while_sending_is_silent(
    http: httpx.Client, scripted_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    gone = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "left while sending" in record.getMessage():
                gone.set()

    watch, log = Watch(), logging.getLogger("coterie.runtime.api.http")
    log.addHandler(watch)
    try:
        with caplog.at_level(logging.DEBUG):
            address = ("127.0.0.1", scripted_server.http_port)
            with socket.create_connection(address, 10) as sock:
                sock.sendall(head.encode() + b'Content-Type: application/json\r\n\r\n{"prompt')
            assert gone.wait(10)
            assert http.get("/health/live").status_code == 200
    finally:
        log.removeHandler(watch)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING or r.exc_info] == []


def wait_for_open(engine: Any, count: int) -> None:
    with engine.changed:
        assert engine.changed.wait_for(lambda: len(engine.open) == count, 10)


def test_models(http: httpx.Client, sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["scripted"]
    assert sdk.models.retrieve("scripted").owned_by == "coterie"
    assert http.get("/v1/models/a/b").status_code == 404


def test_request_ids(http: httpx.Client) -> None:
    given = http.get("/version", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert len(http.get("/version").headers["x-request-id"]) == 32


def test_operations(http: httpx.Client, scripted_server: Any) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        assert http.get(path).status_code == 200, path
    assert http.get("/status").json()["ranks"][0]["seat"] == 0
    scripted_server.engine.live = False
    try:
        for path in ("/health", "/health/live", "/health/ready"):
            assert http.get(path).status_code == 503, path
    finally:
        scripted_server.engine.live = True
    scripted_server.frontend.draining = True
    try:
        for path in ("/health/ready", "/health", "/ping"):
            assert http.get(path).status_code == 503
            assert http.get(path).json()["ready"] is False
        assert http.get("/health/live").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    finally:
        scripted_server.frontend.draining = False


def test_router_counters_are_described() -> None:
    assert set(RouterCounters().as_dict()) <= set(HELP)


def test_metrics(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
    text = http.get("/metrics").text
    for line in (
        'coterie_exchange_seconds_total{seat="1"} 2.5',
        "coterie_requests_running 1.0",
        'coterie_steps_total{seat="0"} 3.0',
    ):
        assert line in text, line
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"coterie_{name}_seconds_bucket" in text
    assert 'coterie_request_success_total{finished_reason="length"}' in text


def test_api_key(
    byte_tokenizer: Any, server_over: Callable[..., Any], scripted_server: Any
) -> None:
    async def make() -> Any:
        return type(scripted_server.engine)(byte_tokenizer)

    with server_over(make, api_key="secret") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        for key in (None, "wrong", "secrets"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            reply = client.get("/v1/models", headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=good).status_code == 200


def test_no_tokenizer(server_over: Callable[..., Any], scripted_server: Any) -> None:
    async def make() -> Any:
        return type(scripted_server.engine)(None)

    with server_over(make) as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": [1, 2], "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["token_ids"] == [1, 2]
        assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2"]
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 400
        stop = {"prompt": [1], "stop": "x", "stream": True}
        assert client.post("/v1/completions", json=stop).status_code == 400
