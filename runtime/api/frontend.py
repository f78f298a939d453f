"""What the HTTP and the RPC front door share: the engine, its metrics, and draining.

Knows no wire format. The engine is named by what is needed of it (``ServingEngine``), which
``runtime.engine`` provides.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from coterie.errors import EngineDead, InvalidRequest
from coterie.runtime.metrics import Metrics, RequestTimer
from coterie.runtime.request import GenerateRequest, RequestOutput
from coterie.runtime.tokenizer import Tokenizer

_THREAD_CHARS = 16_384  # a longer text is tokenized off the event loop
_TEMPLATE_OWN = frozenset(
    {"conversation", "messages", "chat_template", "tokenize", "return_tensors", "return_dict"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "tools", "documents"}
    | {"return_assistant_tokens_mask"}
)


class OutputStream(Protocol):
    """Outputs of one request; ``aclose`` before the end aborts it."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def aclose(self) -> None: ...


class ServingEngine(Protocol):
    """The engine as the front doors see it."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def served_model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def model_config(self) -> Any: ...

    async def submit(self, request: GenerateRequest) -> Any: ...

    async def abort(self, request_id: str) -> Any: ...

    async def status(self) -> dict[str, Any]: ...

    def health(self) -> dict[str, Any]: ...

    def counters(self) -> Mapping[str, Any]: ...

    async def refresh_counters(self) -> None: ...


class Frontend:
    """Submits requests for the front doors.

    Attributes:
        draining: True once shutdown began; new requests are refused, running ones go on.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self.metrics = Metrics(engine.counters)
        self.draining = False

    async def submit(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Hand a request to the engine; returns once it is admitted.

        The returned iterator must be closed (``aclosing``): leaving it early aborts the request.

        Raises:
            InvalidRequest, QueueFull, EngineDead: at once, before any output.
        """
        if self.draining:
            raise EngineDead("the server is shutting down")
        timer = RequestTimer(self.metrics)
        try:
            stream = await self.engine.submit(request)
        except Exception as error:
            timer.end(error)
            raise
        return _Timed(stream, timer)

    async def chat_token_ids(self, messages: list[dict[str, Any]], **kw: Any) -> list[int]:
        """Render and tokenize a conversation.

        Raises:
            InvalidRequest: no tokenizer, no chat template, a keyword that is ours to set, or the
                template refuses.
        """
        taken = sorted(_TEMPLATE_OWN & kw.keys())
        if taken:
            raise InvalidRequest(f"{taken[0]!r} cannot be set here", "chat_template_kwargs")
        tokenizer = self.require_tokenizer("messages")
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size < _THREAD_CHARS:
            return tokenizer.apply_chat_template(messages, **kw)
        return await asyncio.to_thread(tokenizer.apply_chat_template, messages, **kw)

    def require_tokenizer(self, param: str) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise InvalidRequest("this server has no tokenizer; send token ids", param=param)
        return self.engine.tokenizer

    def models(self) -> list[dict[str, Any]]:
        """The one model, as a card."""
        config = self.engine.model_config
        return [
            {
                "id": self.engine.served_model_name,
                "object": "model",
                "owned_by": "coterie",
                "root": self.engine.served_model_name,
                "max_model_len": self.engine.max_model_len,
                "vocab_size": config.vocab_size if config is not None else None,
            }
        ]


class _Timed:
    """A request's outputs, counted as they pass."""

    def __init__(self, stream: OutputStream, timer: RequestTimer) -> None:
        self._stream, self._timer = stream, timer
        self._outputs = stream.__aiter__()
        self._ended = self._closed = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._outputs.__anext__()
        except StopAsyncIteration:
            self._end(None)
            raise
        except Exception as error:
            self._end(error)
            raise
        self._timer.output(output)
        return output

    async def aclose(self) -> None:
        if not self._closed:
            self._ended = self._closed = True
            await self._stream.aclose()

    def _end(self, error: BaseException | None) -> None:
        if not self._ended:
            self._ended = True
            self._timer.end(error)


async def merge(streams: list[AsyncIterator[RequestOutput]]) -> AsyncIterator[tuple[int, Any]]:
    """Outputs of several requests as they come, each with its stream's position.

    Closing the iterator closes all streams; the first error ends it.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(position: int) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(streams[position]) as stream:  # type: ignore[type-var]
                async for output in stream:
                    await queue.put((position, output))
        except Exception as error:
            end = error
        await queue.put((-1, end))

    tasks = [asyncio.create_task(pump(position)) for position in range(len(streams))]
    try:
        left = len(tasks)
        while left:
            position, item = await queue.get()
            if position >= 0:
                yield position, item
                continue
            left -= 1
            if item is not None:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A pump that was cancelled before it ran has closed nothing.
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
