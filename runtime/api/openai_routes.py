"""/v1/models, /v1/completions, /v1/chat/completions over a ``Frontend``.

Reads and checks a body, submits one engine request a prompt, and shapes the outputs. Bodies are
read by hand so that every fault of a body is a 400 in OpenAI's form.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from coterie.errors import InvalidRequest, RuntimeFailure
from coterie.runtime.api.errors_http import HttpError, model_not_found, validation_error
from coterie.runtime.api.frontend import Frontend, TimedStream, merge
from coterie.runtime.api.openai_format import ChatFormat, Choice, CompletionFormat, Usage
from coterie.runtime.api.openai_types import ChatRequest, CompletionRequest, SamplingFields
from coterie.runtime.api.streaming import EventStream, answer
from coterie.runtime.request import GenerateRequest, RequestOutput, SamplingParams
from coterie.runtime.sse import DONE, event

MAX_PROMPTS = 1024
_Body = TypeVar("_Body", bound=SamplingFields)


def openai_router(frontend: Frontend, max_body_bytes: int) -> APIRouter:
    """The routes of one server."""
    routes = OpenAIRoutes(frontend, max_body_bytes)
    router = APIRouter(prefix="/v1")
    router.add_api_route("/models", routes.models, methods=["GET"])
    router.add_api_route("/models/{name:path}", routes.model, methods=["GET"])
    options: dict[str, Any] = {"methods": ["POST"], "response_model": None}
    router.add_api_route("/completions", routes.completions, **options)
    router.add_api_route("/chat/completions", routes.chat, **options)
    return router


class OpenAIRoutes:
    """Handlers; each reads its request by hand."""

    def __init__(self, frontend: Frontend, max_body_bytes: int) -> None:
        self._frontend = frontend
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())

    async def models(self) -> dict[str, Any]:
        cards = [card | {"created": self._created} for card in self._frontend.models()]
        return {"object": "list", "data": cards}

    async def model(self, name: str) -> dict[str, Any]:
        for card in self._frontend.models():
            if card["id"] == name:
                return card | {"created": self._created}
        raise model_not_found(name)

    async def completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        return await answer(request, self._complete(body))

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        return await answer(request, self._chat(body))

    async def _complete(self, body: CompletionRequest) -> Response:
        prompts = body.prompts()
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequest(f"at most {MAX_PROMPTS} prompts in one request", "prompt")
        params = body.to_sampling_params()
        request_id = f"cmpl-{uuid.uuid4().hex}"
        echoes = [self._echo(prompt) if body.echo else "" for prompt in prompts]
        shape = CompletionFormat(request_id, *self._names(), bool(body.return_token_ids))
        streams = await self._submit(request_id, prompts, params, body)
        if body.stream:
            events = _completion_events(streams, params.n, echoes, shape, body)
            return EventStream(events, streams)
        choices, usage = await _collect(streams, params.n)
        per_choice = [echoes[index // params.n] for index in range(len(choices))]
        return _json(shape.whole(choices, per_choice, usage))

    async def _chat(self, body: ChatRequest) -> Response:
        params = body.to_sampling_params()
        token_ids = await self._frontend.chat_token_ids(
            body.plain_messages(), bool(body.add_special_tokens), **body.template_kwargs()
        )
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        shape = ChatFormat(request_id, *self._names(), bool(body.return_token_ids))
        streams = await self._submit(request_id, [token_ids], params, body)
        if body.stream:
            return EventStream(_chat_events(streams, shape, body), streams)
        choices, usage = await _collect(streams, params.n)
        return _json(shape.whole(choices, usage))

    def _names(self) -> tuple[str, Any]:
        engine = self._frontend.engine
        return engine.served_model_name, engine.tokenizer

    def _echo(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._frontend.require_tokenizer("echo").decode(prompt)

    async def _submit(
        self,
        request_id: str,
        prompts: list[str | list[int]],
        params: SamplingParams,
        body: SamplingFields,
    ) -> list[TimedStream]:
        """One engine request a prompt: all admitted, or none."""
        streams: list[TimedStream] = []
        try:
            for position, prompt in enumerate(prompts):
                if isinstance(prompt, str) and body.add_special_tokens is not None:
                    prompt = await self._frontend.encode(prompt, body.add_special_tokens)
                request = GenerateRequest(
                    request_id=f"{request_id}-{position}" if len(prompts) > 1 else request_id,
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_token_ids=None if isinstance(prompt, str) else prompt,
                    sampling_params=params,
                    deadline_s=body.deadline_s,
                    data_parallel_rank=body.data_parallel_rank,
                    refuse_cut=body.limits_output,
                )
                streams.append(await self._frontend.submit(request))
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        """The body, checked.

        Raises:
            InvalidRequest, HttpError: wrong media type, too large, malformed, or refused.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise InvalidRequest(f"Content-Type must be application/json, got {media_type!r}")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._max_body_bytes:
                raise HttpError(
                    413,
                    f"the body is larger than {self._max_body_bytes} bytes",
                    "invalid_request_error",
                    "request_too_large",
                )
        try:
            body = kind.model_validate_json(bytes(data))
        except ValidationError as error:
            raise validation_error(error) from None
        if body.model is not None and body.model != self._frontend.engine.served_model_name:
            raise model_not_found(body.model)
        rank = request.headers.get("x-data-parallel-rank")
        if rank is not None:
            if not rank.isdecimal():
                raise InvalidRequest(f"X-data-parallel-rank must be a rank index, got {rank!r}")
            body.data_parallel_rank = int(rank)
        body.check()
        return body


async def _collect(streams: list[TimedStream], n: int) -> tuple[list[Choice], Usage]:
    choices = [Choice() for _ in range(len(streams) * n)]
    usage = Usage()
    async with aclosing(merge(streams)) as outputs:
        async for position, output in outputs:
            _raise_if_failed(output)
            choices[position * n + output.index].add(output)
            usage.add(position, output)
    return choices, usage


async def _completion_events(
    streams: list[TimedStream],
    n: int,
    echoes: list[str],
    shape: CompletionFormat,
    body: CompletionRequest,
) -> AsyncGenerator[bytes, None]:
    usage = Usage()
    echoed: set[int] = set()
    async with aclosing(merge(streams)) as outputs:
        async for position, output in outputs:
            _raise_if_failed(output)
            usage.add(position, output)
            index = position * n + output.index
            echo = "" if index in echoed else echoes[position]
            echoed.add(index)
            yield event(_with_usage(shape.chunk(index, output, echo), body, usage))
    if body.include_usage:
        yield event(shape.usage_chunk(usage))
    yield DONE


async def _chat_events(
    streams: list[TimedStream], shape: ChatFormat, body: ChatRequest
) -> AsyncGenerator[bytes, None]:
    usage = Usage()
    begun: set[int] = set()
    async with aclosing(merge(streams)) as outputs:
        async for position, output in outputs:
            _raise_if_failed(output)
            usage.add(position, output)
            if output.index not in begun:
                begun.add(output.index)
                role = shape.role_chunk(output.index, output.prompt_token_ids)
                yield event(_with_usage(role, body, usage))
            if output.token_ids or output.text:
                yield event(_with_usage(shape.delta_chunk(output), body, usage))
            if output.finish_reason is not None:
                yield event(_with_usage(shape.final_chunk(output), body, usage))
    if body.include_usage:
        yield event(shape.usage_chunk(usage))
    yield DONE


def _with_usage(chunk: dict[str, Any], body: SamplingFields, usage: Usage) -> dict[str, Any]:
    if not body.include_usage:
        return chunk
    return chunk | {"usage": usage.body() if body.continuous_usage else None}


def _raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        raise RuntimeFailure("the request failed in the engine")


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
