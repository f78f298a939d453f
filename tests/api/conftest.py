"""A whole server (HTTP and RPC) on a thread, over a scripted engine that needs no ranks.

The engine repeats the prompt's tokens. A prompt that begins with ``hang`` stops after one token
until it is closed; ``full``, ``dead`` and ``late`` fail in the ways their names say.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import DeadlineExceeded, EngineDead, InvalidRequest, QueueFull
from coterie.runtime.api.cli_serve import bound
from coterie.runtime.api.frontend import Frontend
from coterie.runtime.api.http import build_app, http_server
from coterie.runtime.api.rpc_service import rpc_methods
from coterie.runtime.detokenizer import Detokenizer
from coterie.runtime.request import GenerateRequest, RequestOutput, TokenLogprob
from coterie.runtime.rpc.server import RpcLimits, RpcServer
from coterie.runtime.tokenizer import Tokenizer

MAX_MODEL_LEN = 4096


@dataclass
class _Config:
    vocab_size: int = 261


@dataclass
class ScriptedEngine:
    """Deterministic stand-in for AsyncEngine; see the module."""

    tokenizer: Tokenizer | None
    served_model_name: str = "scripted"
    max_model_len: int = MAX_MODEL_LEN
    model_config: _Config = field(default_factory=_Config)
    open: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    live: bool = True
    changed: threading.Condition = field(default_factory=threading.Condition)

    async def submit(self, request: GenerateRequest) -> "ScriptedStream":
        prompt = request.prompt_token_ids
        if prompt is None:
            if request.prompt is None:
                raise InvalidRequest("a prompt is needed", "prompt")
            assert self.tokenizer is not None
            prompt = self.tokenizer.encode(request.prompt)
        text = bytes(token for token in prompt if token < 256)
        if not self.live or text.startswith(b"dead"):
            raise EngineDead("the engine is stopped")
        if text.startswith(b"full"):
            raise QueueFull("the waiting queue is full", retry_after_s=2.4)
        request.sampling_params.validate(self.model_config.vocab_size)
        if len(prompt) >= self.max_model_len:
            raise InvalidRequest("the prompt is longer than the model allows", "prompt")
        with self.changed:
            self.open.add(request.request_id)
            self.changed.notify_all()
        return ScriptedStream(self, request, prompt)

    async def abort(self, request_id: str) -> None:
        self.closed(request_id, True)

    def closed(self, request_id: str, aborted: bool) -> None:
        with self.changed:
            if request_id in self.open and aborted:
                self.aborted.append(request_id)
            self.open.discard(request_id)
            self.changed.notify_all()

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: not self.open, timeout_s), self.open

    async def status(self) -> dict[str, Any]:
        counts = {"running": len(self.open), "waiting": 0, "finished": 0, "aborted": 0}
        rank = {
            "seat": 0,
            "roles": ["attention", "experts"],
            "pid": 1,
            "node": "n",
            "state": "idle",
            "step": 3,
            "last_commit_age_s": 0.5,
            "kv_blocks_free": 4,
            "kv_blocks_total": 8,
            "experts": {"layers": 2, "physical_ids": [0, 1], "tokens": [5, 6]},
        }
        return {"epoch": 1, "layout": "1 rank", "ranks": [rank], "requests": counts}

    def health(self) -> dict[str, Any]:
        return {"live": self.live, "ready": self.live, "ranks": []}

    def counters(self) -> dict[str, Any]:
        return {"requests_running": 1.0, "exchange_s": {0: 1.5, 1: 2.5}, "steps_total": {0: 3.0}}

    async def refresh_counters(self) -> None:
        return None


class ScriptedStream:
    """Outputs of one request, all choices in turn."""

    def __init__(self, engine: ScriptedEngine, request: GenerateRequest, prompt: list[int]) -> None:
        self._engine, self._id = engine, request.request_id
        self._outputs = self._run(request, prompt)

    def __aiter__(self) -> "ScriptedStream":
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            return await anext(self._outputs)
        except StopAsyncIteration:
            self._engine.closed(self._id, False)
            raise

    async def aclose(self) -> None:
        await self._outputs.aclose()
        self._engine.closed(self._id, True)

    async def _run(self, request: GenerateRequest, prompt: list[int]) -> Any:
        params = request.sampling_params
        limit = min(params.max_tokens or MAX_MODEL_LEN, self._engine.max_model_len - len(prompt))
        body = [token for token in prompt if token < 256] or [ord("x")]
        states = [Detokenizer(self._engine.tokenizer, prompt, params) for _ in range(params.n)]
        done: set[int] = set()
        if bytes(body).startswith(b"late"):
            raise DeadlineExceeded("the deadline passed while waiting")
        for position in range(limit):
            for index in range(params.n):
                if index in done:
                    continue
                token = body[(position + index) % len(body)]
                last = position == limit - 1
                delta = states[index].push([token], last)
                reason = "stop" if delta.stop_string else "length" if last else None
                if reason:
                    done.add(index)
                top = [(token, -0.5), (0, -2.0)][: params.logprobs or 0]
                yield RequestOutput(
                    request_id=request.request_id,
                    index=index,
                    text=delta.text,
                    token_ids=[token],
                    logprobs=None if params.logprobs is None else [TokenLogprob(token, -0.5, top)],
                    finish_reason=reason,
                    stop_reason=delta.stop_string,
                    prompt_token_ids=prompt if position == 0 else None,
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=1,
                )
            if bytes(body).startswith(b"break") and position == 1:
                raise DeadlineExceeded("the deadline passed")
            if bytes(body).startswith(b"hang"):
                await asyncio.Event().wait()
            await asyncio.sleep(0)


@dataclass
class Server:
    """Addresses of a running server."""

    http_port: int
    rpc_port: int
    engine: Any
    frontend: Frontend

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"


@contextmanager
def running_server(
    make_engine: Callable[[], Any],
    *,
    api_key: str | None = None,
    limits: RpcLimits | None = None,
    max_body_bytes: int = 1 << 20,
) -> Iterator[Server]:
    """A server on a thread of its own; ``make_engine`` is awaited on its loop."""
    ready: threading.Event = threading.Event()
    state: dict[str, Any] = {}

    async def serve() -> None:
        engine = await make_engine()
        frontend = Frontend(engine)
        app = build_app(frontend, api_key=api_key, max_body_bytes=max_body_bytes)
        http = http_server(app)
        rpc = RpcServer(rpc_methods(frontend), api_key=api_key, limits=limits)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            http_socket = stack.enter_context(bound("127.0.0.1", 0, "--port"))
            rpc_socket = stack.enter_context(bound("127.0.0.1", 0, "--rpc-port"))
            ports = http_socket.getsockname()[1], rpc_socket.getsockname()[1]
            await rpc.start(rpc_socket)
            serving = asyncio.create_task(http.serve(sockets=[http_socket]))
            await http.ready(serving)
            state.update(server=Server(*ports, engine, frontend), loop=loop, stop=stop)
            ready.set()
            await stop.wait()
            http.stop(1)
            await rpc.close(0)
            await serving
            shutdown = getattr(engine, "shutdown", None)
            if shutdown is not None:
                await shutdown(10.0)

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            state["error"] = error
        ready.set()

    thread = threading.Thread(target=main, name="test-server", daemon=True)
    thread.start()
    assert ready.wait(100)
    if "error" in state:
        raise state["error"]
    try:
        yield state["server"]
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(20)
        assert not thread.is_alive()
    if "error" in state:
        raise state["error"]


@pytest.fixture(scope="module")
def byte_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, write_byte_tokenizer: Callable[..., Path]
) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def server_over() -> Callable[..., Any]:
    return running_server


@pytest.fixture(scope="module")
def scripted_server(byte_tokenizer: Tokenizer) -> Iterator[Server]:
    async def make() -> ScriptedEngine:
        return ScriptedEngine(byte_tokenizer)

    with running_server(make) as server:
        yield server


@pytest.fixture
def until() -> Callable[..., None]:
    """``until(check)``: wait for something that only polling can see, with a deadline."""

    def wait(check: Callable[[], bool], timeout_s: float = 10.0) -> None:
        ends = time.monotonic() + timeout_s
        pause = threading.Event()
        while not check():
            assert time.monotonic() < ends, "not in time"
            pause.wait(0.01)

    return wait
