"""SDK: ``AsyncClient`` and ``Client`` over the msgpack RPC of a running server.

Imports neither torch nor transformers nor ray. Connects on the first call and again after a lost
connection; a call that was under way then fails with EngineDead and is not repeated.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import aclosing
from typing import Any, Literal, Self, TypeVar, overload

from coterie.errors import CoterieError, InvalidRequest
from coterie.runtime.api import rpc_types as types
from coterie.runtime.api.rpc_types import GeneratedChoice, Generation
from coterie.runtime.request import RequestOutput, SamplingParams
from coterie.runtime.rpc.client import RpcConnection

_T = TypeVar("_T")
Message = dict[str, Any]
_END_S = 2.0


class AsyncClient:
    """Calls a server from asyncio. Belongs to one event loop.

    Args:
        host, port: of the server's RPC (``--rpc-port``).
        api_key: when the server asks for one.
        timeout_s: per call, sent to the server as its deadline; None = no limit.
        connect_timeout_s: for the connection alone.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8001,
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self._host, self._port = host, port
        self._api_key, self._timeout_s = api_key, timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._connection: RpcConnection | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled on the server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas as they come. Closing the iterator early aborts the request.

        Args:
            **params: fields of SamplingParams, when ``sampling_params`` is not given.
        """
        call = types.GenerateCall(
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            sampling_params=_sampling_params(sampling_params, params, max_tokens=16),
            request_id=request_id,
        )
        return self._stream(types.GENERATE, call, timeout_s)

    def chat_stream(
        self,
        messages: list[Message],
        *,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The assistant's answer, as deltas; up to the model's length unless limited."""
        call = types.ChatCall(
            messages=messages,
            sampling_params=_sampling_params(sampling_params, params, max_tokens=None),
            chat_template_kwargs=chat_template_kwargs or {},
            request_id=request_id,
        )
        return self._stream(types.CHAT, call, timeout_s)

    @overload
    async def generate(
        self, prompt: str | None = ..., *, stream: Literal[False] = ..., **kw: Any
    ) -> Generation: ...

    @overload
    async def generate(
        self, prompt: str | None = ..., *, stream: Literal[True], **kw: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def generate(
        self, prompt: str | None = None, *, stream: bool = False, **kw: Any
    ) -> Generation | AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; arguments as ``generate_stream``.

        Raises:
            InvalidRequest, QueueFull, DeadlineExceeded, EngineDead: as the server says.
        """
        outputs = self.generate_stream(prompt, **kw)
        return outputs if stream else await _whole(outputs)

    @overload
    async def chat(
        self, messages: list[Message], *, stream: Literal[False] = ..., **kw: Any
    ) -> Generation: ...

    @overload
    async def chat(
        self, messages: list[Message], *, stream: Literal[True], **kw: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def chat(
        self, messages: list[Message], *, stream: bool = False, **kw: Any
    ) -> Generation | AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; arguments as ``chat_stream``."""
        outputs = self.chat_stream(messages, **kw)
        return outputs if stream else await _whole(outputs)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: list[Message] | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text, or of a conversation through the chat template."""
        call = types.TokenizeCall(
            text=text, messages=messages, add_special_tokens=add_special_tokens
        )
        reply: types.TokenizeReply = await self._unary(types.TOKENIZE, call, types.TokenizeReply)
        return reply.token_ids

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        call = types.DetokenizeCall(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        reply: types.DetokenizeReply = await self._unary(
            types.DETOKENIZE, call, types.DetokenizeReply
        )
        return reply.text

    async def models(self) -> list[dict[str, Any]]:
        """Cards of the served models."""
        return await self._unary(types.MODELS, types.Nothing(), list[dict[str, Any]])

    async def status(self) -> dict[str, Any]:
        """What ``/status`` says."""
        return await self._unary(types.STATUS, types.Nothing(), dict[str, Any])

    async def health(self) -> dict[str, Any]:
        """``{"live", "ready", "ranks"}``."""
        return await self._unary(types.HEALTH, types.Nothing(), dict[str, Any])

    async def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""
        await self._unary(types.ABORT, types.AbortCall(request_id=request_id), types.Nothing)

    async def _unary(self, method: str, payload: Any, reply: Any) -> Any:
        connection = await self._connect()
        return await connection.unary(method, payload, reply, self._timeout_s)

    async def _stream(
        self, method: str, payload: Any, timeout_s: float | None
    ) -> AsyncGenerator[RequestOutput, None]:
        connection = await self._connect()
        limit = self._timeout_s if timeout_s is None else timeout_s
        outputs: AsyncGenerator[RequestOutput, None] = connection.stream(
            method, payload, RequestOutput, limit
        )
        async with aclosing(outputs) as items:
            async for item in items:
                yield item

    async def _connect(self) -> RpcConnection:
        async with self._connecting:
            if self._connection is None or self._connection.closed:
                if self._connection is not None:
                    await self._connection.close()
                self._connection = await RpcConnection.connect(
                    self._host,
                    self._port,
                    api_key=self._api_key,
                    timeout_s=self._connect_timeout_s,
                )
            return self._connection


class Client:
    """The same for plain code: an ``AsyncClient`` on a thread of its own. Thread-safe.

    Arguments as ``AsyncClient``. Every call blocks until the answer or its timeout. One that
    nobody closes is closed when it is collected, at the interpreter's end at the latest.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 8001, **kw: Any) -> None:
        self._client = AsyncClient(host, port, **kw)
        self._loop = asyncio.new_event_loop()
        # Nothing that the thread holds may hold the client, or it would never be collected.
        thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="coterie-client", daemon=True
        )
        thread.start()
        self._end = weakref.finalize(self, _end, self._loop, thread, self._client, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._end()

    @overload
    def generate(
        self, prompt: str | None = ..., *, stream: Literal[False] = ..., **kw: Any
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: str | None = ..., *, stream: Literal[True], **kw: Any
    ) -> Generator[RequestOutput, None, None]: ...

    def generate(
        self, prompt: str | None = None, *, stream: bool = False, **kw: Any
    ) -> Generation | Generator[RequestOutput, None, None]:
        """Complete a prompt; arguments as ``AsyncClient.generate_stream``."""
        outputs = self._client.generate_stream(prompt, **kw)
        return self._iterate(outputs) if stream else self._run(_whole(outputs))

    @overload
    def chat(
        self, messages: list[Message], *, stream: Literal[False] = ..., **kw: Any
    ) -> Generation: ...

    @overload
    def chat(
        self, messages: list[Message], *, stream: Literal[True], **kw: Any
    ) -> Generator[RequestOutput, None, None]: ...

    def chat(
        self, messages: list[Message], *, stream: bool = False, **kw: Any
    ) -> Generation | Generator[RequestOutput, None, None]:
        """Answer a conversation; arguments as ``AsyncClient.chat_stream``."""
        outputs = self._client.chat_stream(messages, **kw)
        return self._iterate(outputs) if stream else self._run(_whole(outputs))

    def tokenize(self, text: str | None = None, **kw: Any) -> list[int]:
        """Token ids of a text, or of ``messages``."""
        return self._run(self._client.tokenize(text, **kw))

    def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        call = self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        return self._run(call)

    def models(self) -> list[dict[str, Any]]:
        """Cards of the served models."""
        return self._run(self._client.models())

    def status(self) -> dict[str, Any]:
        """What ``/status`` says."""
        return self._run(self._client.status())

    def health(self) -> dict[str, Any]:
        """``{"live", "ready", "ranks"}``."""
        return self._run(self._client.health())

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""
        self._run(self._client.abort(request_id))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if not self._end.alive:
            work.close()
            raise InvalidRequest("this client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: end the call on the server too
            raise

    def _iterate(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> Generator[RequestOutput, None, None]:
        async def following() -> RequestOutput | None:
            return await anext(outputs, None)

        try:
            while (output := self._run(following())) is not None:
                yield output
        finally:
            if self._end.alive:
                self._run(outputs.aclose())


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        # What is left would be destroyed in its midst, which asyncio complains of.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: AsyncClient, process: int
) -> None:
    """Close the connection, end loop and thread. Blocks: a moment."""
    if os.getpid() != process or not thread.is_alive():  # a fork has no such thread
        return

    async def end() -> None:
        try:
            await client.close()
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:  # the collector runs in any thread
        thread.join(2 * _END_S)


async def _whole(outputs: AsyncGenerator[RequestOutput, None]) -> Generation:
    choices: dict[int, GeneratedChoice] = {}
    result = Generation(request_id="")
    async with aclosing(outputs) as items:
        async for output in items:
            _add(result, choices, output)
    result.outputs = [choices[index] for index in sorted(choices)]
    if not result.outputs:
        raise CoterieError("the server sent no output")
    return result


def _add(result: Generation, choices: dict[int, GeneratedChoice], output: RequestOutput) -> None:
    result.request_id = output.request_id
    choice = choices.setdefault(output.index, GeneratedChoice(index=output.index))
    choice.text += output.text
    choice.token_ids.extend(output.token_ids)
    if output.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or ()), *output.logprobs]
    if output.prompt_token_ids is not None:
        result.prompt_token_ids = output.prompt_token_ids
        result.num_cached_tokens = output.num_cached_tokens
    if output.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason


def _sampling_params(
    given: SamplingParams | None, fields: dict[str, Any], max_tokens: int | None
) -> SamplingParams:
    if given is not None:
        if fields:
            raise InvalidRequest(
                f"{sorted(fields)[0]!r} belongs into sampling_params", sorted(fields)[0]
            )
        return given
    for name in ("stop", "stop_token_ids"):
        value = fields.get(name)
        if value is not None:
            fields[name] = (value,) if isinstance(value, (str, int)) else tuple(value)
    unknown = sorted(fields.keys() - set(SamplingParams.__struct_fields__))
    if unknown:
        raise InvalidRequest(f"SamplingParams has no field {unknown[0]!r}", unknown[0])
    return SamplingParams(**{"max_tokens": max_tokens, **fields})
