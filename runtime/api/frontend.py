"""What the HTTP and the RPC front door share: the engine, its metrics, and draining.

Knows no wire format. The engine is named by what is needed of it (``ServingEngine``), which
``runtime.engine`` provides.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, Self

from coterie.errors import Cancelled, EngineDead, InvalidRequest
from coterie.runtime.metrics import Metrics, RequestTimer
from coterie.runtime.request import GenerateRequest, RequestOutput
from coterie.runtime.tokenizer import Tokenizer

_THREAD_CHARS = 16_384  # a longer text is tokenized off the event loop
_TEMPLATE_OWN = frozenset(
    {"conversation", "messages", "chat_template", "tokenize", "return_tensors", "return_dict"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "tools", "documents"}
    | {"return_assistant_tokens_mask", "add_special_tokens"}
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
        self._open: set[TimedStream] = set()
        self._idle = asyncio.Event()

    async def submit(self, request: GenerateRequest) -> "TimedStream":
        """Hand a request to the engine; returns once it is admitted.

        The returned stream must be closed (``aclosing``): leaving it early aborts the request.

        Raises:
            InvalidRequest, QueueFull, EngineDead: at once, before any output.
        """
        if self.draining:
            raise EngineDead("the server is shutting down")
        timer = RequestTimer(self.metrics)
        try:
            outputs = await self.engine.submit(request)
        except Exception as error:
            timer.end(error)
            raise
        stream = TimedStream(self, request.request_id, outputs, timer)
        self._open.add(stream)
        return stream

    def left(self, stream: "TimedStream") -> None:
        """A stream ended or was closed."""
        self._open.discard(stream)
        if not self._open:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is open. Blocks: without a limit of its own; bound it."""
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    async def abort_open(self) -> None:
        """End the requests that are still open; their clients are told why."""
        self.draining = True
        for stream in list(self._open):
            await self.engine.abort(stream.request_id)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequest: no tokenizer, or no valid Unicode.
        """
        tokenizer = self.require_tokenizer("prompt")
        if len(text) < _THREAD_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def chat_token_ids(
        self, messages: list[dict[str, Any]], add_special_tokens: bool = False, /, **kw: Any
    ) -> list[int]:
        """Render and tokenize a conversation.

        Args:
            add_special_tokens: beside those that the template writes.
            **kw: for the template.

        Raises:
            InvalidRequest: no tokenizer, no chat template, a keyword that is ours to set, or the
                template refuses.
        """
        taken = sorted(_TEMPLATE_OWN & kw.keys())
        if taken:
            raise InvalidRequest(f"{taken[0]!r} cannot be set here", "chat_template_kwargs")
        tokenizer = self.require_tokenizer("messages")
        size = sum(len(str(message.get("content") or "")) for message in messages)
        kw["add_special_tokens"] = add_special_tokens
        if size < _THREAD_CHARS:
            return tokenizer.apply_chat_template(messages, **kw)
        return await asyncio.to_thread(tokenizer.apply_chat_template, messages, **kw)

    def health(self) -> dict[str, Any]:
        """The engine's, not ready while draining."""
        state = self.engine.health()
        return {**state, "ready": bool(state["ready"]) and not self.draining}

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


class TimedStream:
    """A request's outputs, counted as they pass."""

    def __init__(
        self, frontend: Frontend, request_id: str, stream: OutputStream, timer: RequestTimer
    ) -> None:
        self.request_id = request_id
        self._frontend, self._stream, self._timer = frontend, stream, timer
        self._outputs = stream.__aiter__()
        self._ended = self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._outputs.__anext__()
        except StopAsyncIteration:
            self._end(None)
            raise
        except Exception as error:
            self._end(error)
            if isinstance(error, Cancelled) and self._frontend.draining:
                raise EngineDead("the server is shutting down") from error
            raise
        self._timer.output(output)
        return output

    async def aclose(self) -> None:
        if not self._closed:
            self._ended = self._closed = True
            self._frontend.left(self)
            await self._stream.aclose()

    def _end(self, error: BaseException | None) -> None:
        if not self._ended:
            self._ended = True
            self._timer.end(error)
            self._frontend.left(self)


async def merge(streams: Sequence[TimedStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come, each with its stream's position.

    Closing the iterator closes all streams; the first error ends it.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(
        maxsize=2 * len(streams)
    )

    async def pump(position: int) -> None:
        end: Exception | None = None
        try:
            async with aclosing(streams[position]) as stream:
                async for output in stream:
                    await queue.put((position, output))
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(pump(position)) for position in range(len(streams))]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, tuple):
                yield item
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
            await stream.aclose()
