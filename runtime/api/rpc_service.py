"""The RPC methods over a ``Frontend``: what ``runtime.rpc.server`` is given to serve."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from coterie.errors import InvalidRequest
from coterie.runtime.api import rpc_types as types
from coterie.runtime.api.frontend import Frontend
from coterie.runtime.request import GenerateRequest, RequestOutput
from coterie.runtime.rpc.server import Method


def rpc_methods(frontend: Frontend) -> dict[str, Method]:
    """The method table of one server."""
    service = RpcService(frontend)
    return {
        types.GENERATE: Method(payload=types.GenerateCall, stream=service.generate),
        types.CHAT: Method(payload=types.ChatCall, stream=service.chat),
        types.TOKENIZE: Method(payload=types.TokenizeCall, unary=service.tokenize),
        types.DETOKENIZE: Method(payload=types.DetokenizeCall, unary=service.detokenize),
        types.STATUS: Method(payload=types.Nothing, unary=service.status),
        types.HEALTH: Method(payload=types.Nothing, unary=service.health),
        types.MODELS: Method(payload=types.Nothing, unary=service.models),
        types.ABORT: Method(payload=types.AbortCall, unary=service.abort),
    }


class RpcService:
    """Handlers: a payload in, an answer or a stream of outputs out."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def generate(self, call: types.GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        request = GenerateRequest(
            request_id=call.request_id or f"rpc-{uuid.uuid4().hex}",
            prompt=call.prompt,
            prompt_token_ids=call.prompt_token_ids,
            sampling_params=call.sampling_params,
            deadline_s=call.deadline_s,
            data_parallel_rank=call.data_parallel_rank,
        )
        async for output in self._outputs(request):
            yield output

    async def chat(self, call: types.ChatCall) -> AsyncGenerator[RequestOutput, None]:
        token_ids = await self._chat_token_ids(call.messages, call.chat_template_kwargs)
        request = GenerateRequest(
            request_id=call.request_id or f"rpc-{uuid.uuid4().hex}",
            prompt_token_ids=token_ids,
            sampling_params=call.sampling_params,
            deadline_s=call.deadline_s,
            data_parallel_rank=call.data_parallel_rank,
        )
        async for output in self._outputs(request):
            yield output

    async def tokenize(self, call: types.TokenizeCall) -> types.TokenizeReply:
        if (call.text is None) == (call.messages is None):
            raise InvalidRequest("give exactly one of text and messages", "text")
        if call.messages is not None:
            token_ids = await self._chat_token_ids(call.messages, {})
        else:
            tokenizer = self._frontend.require_tokenizer("text")
            token_ids = await asyncio.to_thread(
                tokenizer.encode, call.text or "", call.add_special_tokens
            )
        return types.TokenizeReply(token_ids=token_ids)

    async def detokenize(self, call: types.DetokenizeCall) -> types.DetokenizeReply:
        tokenizer = self._frontend.require_tokenizer("token_ids")
        if any(not 0 <= token < 2**32 for token in call.token_ids):
            raise InvalidRequest("token ids must not be negative", "token_ids")
        text = await asyncio.to_thread(tokenizer.decode, call.token_ids, call.skip_special_tokens)
        return types.DetokenizeReply(text=text)

    async def status(self, call: types.Nothing) -> dict[str, Any]:
        return await self._frontend.engine.status()

    async def health(self, call: types.Nothing) -> dict[str, Any]:
        return self._frontend.health()

    async def models(self, call: types.Nothing) -> list[dict[str, Any]]:
        return self._frontend.models()

    async def abort(self, call: types.AbortCall) -> types.Nothing:
        await self._frontend.engine.abort(call.request_id)
        return types.Nothing()

    async def _chat_token_ids(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any]
    ) -> list[int]:
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or not isinstance(
                message.get("content"), str
            ):
                raise InvalidRequest(
                    "a message is {role, content}, both text", f"messages[{index}]"
                )
        return await self._frontend.chat_token_ids(messages, **kwargs)

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        stream = await self._frontend.submit(request)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()
