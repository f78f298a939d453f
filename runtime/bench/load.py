"""Runs a workload at one concurrency against a target and records when every token came.

Two targets behind one signature: an engine in this process, and any OpenAI server over HTTP.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from coterie.errors import CoterieError, RuntimeFailure
from coterie.runtime import sse
from coterie.runtime.api.frontend import ServingEngine
from coterie.runtime.bench.workload import Prompt, Workload
from coterie.runtime.request import GenerateRequest, SamplingParams

REQUEST_TIMEOUT_S = 3600.0


@dataclass(slots=True)
class Token:
    """News of one request: ``count`` tokens at one moment; prompt tokens once known."""

    count: int
    prompt_tokens: int = 0
    total: int | None = None
    """The server's own count of output tokens, when it tells."""


Target = Callable[[Prompt, Workload], AsyncGenerator[Token, None]]


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times in seconds."""

    start_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between successive deliveries (inter-token latency)."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


async def run_load(target: Target, workload: Workload, concurrency: int) -> list[Record]:
    """All requests of a workload, at most ``concurrency`` at a time, in arrival order."""
    began = time.perf_counter()
    pending = iter(zip(workload.prompts, workload.arrivals_s, strict=True))
    records: list[Record] = []

    async def client() -> None:
        for prompt, arrival_s in pending:
            wait_s = began + arrival_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            records.append(await _follow(target, prompt, workload))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return records


async def _follow(target: Target, prompt: Prompt, workload: Workload) -> Record:
    record = Record(start_s=time.perf_counter())
    last = record.start_s
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            async with aclosing(target(prompt, workload)) as tokens:
                async for token in tokens:
                    now = time.perf_counter()
                    record.prompt_tokens = token.prompt_tokens or record.prompt_tokens
                    if token.total is not None:
                        record.output_tokens = token.total
                    if token.count == 0:
                        continue
                    if token.total is None:
                        record.output_tokens += token.count
                    if record.ttft_s is None:
                        record.ttft_s = now - record.start_s
                    else:
                        record.gaps_s.append(now - last)
                    last = now
        record.e2e_s = last - record.start_s
    except (CoterieError, httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


def engine_target(engine: ServingEngine) -> Target:
    """Requests straight to an engine."""

    async def target(prompt: Prompt, workload: Workload) -> AsyncGenerator[Token, None]:
        request = GenerateRequest(
            request_id=f"bench-{uuid.uuid4().hex}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else list(prompt),
            sampling_params=SamplingParams(
                max_tokens=workload.output_len,
                temperature=workload.temperature,
                ignore_eos=workload.ignore_eos,
            ),
        )
        stream = await engine.submit(request)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield Token(len(output.token_ids), output.num_prompt_tokens)

    return target


def http_target(client: httpx.AsyncClient, model: str) -> Target:
    """Requests to ``/v1/completions`` of an OpenAI server, streamed.

    Args:
        client: its base_url is the server's.
    """

    async def target(prompt: Prompt, workload: Workload) -> AsyncGenerator[Token, None]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": workload.output_len,
            "temperature": workload.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if workload.ignore_eos:
            body["ignore_eos"] = True
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise RuntimeFailure(f"{reply.status_code}: {reply.text[:200]}")
            async for line in sse.lines(reply.aiter_text()):
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    yield _chunk(json.loads(line[5:]))

    return target


def _chunk(body: dict[str, Any]) -> Token:
    """A chunk is one delivery; the usage at the end has the true number of tokens."""
    if "error" in body:
        raise RuntimeFailure(str(body["error"].get("message")))
    usage = body.get("usage") or {}
    return Token(
        count=1 if body.get("choices") else 0,
        prompt_tokens=usage.get("prompt_tokens", 0),
        total=usage.get("completion_tokens"),
    )
