"""What a caller holds of its request: an async iterator of outputs.

Outputs that wait for a slow reader are merged per choice, so at most one object per choice waits
however far the reader is behind.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from coterie.runtime.request import RequestOutput


class RequestStream:
    """Iterate it to the end, or ``aclose`` it, which aborts what is left.

    Attributes:
        request_id: of the request.
        num_open: choices without a finish_reason.
    """

    def __init__(
        self, request_id: str, num_choices: int, abort: Callable[[str], Awaitable[object]]
    ) -> None:
        self.request_id = request_id
        self.num_open = num_choices
        self._abort = abort
        self._waiting: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Every choice finished, or the request failed."""
        return self.num_open == 0 or self._error is not None

    def put(self, output: RequestOutput) -> None:
        """Add news of one choice."""
        if self.ended:
            return
        if output.finish_reason is not None:
            self.num_open -= 1
        earlier = self._waiting.get(output.index)
        self._waiting[output.index] = merged(earlier, output) if earlier else output
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the stream: the reader gets what waits, then ``error``."""
        if not self.ended:
            self._error = error
            self._news.set()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            CoterieError: the request failed.

        Blocks: until there is news; a request's own deadline bounds it.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self.num_open == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._waiting.pop(next(iter(self._waiting)))

    async def aclose(self) -> None:
        """Abort what is not finished. Safe to call twice."""
        if not self.ended:
            await self._abort(self.request_id)
        self._waiting.clear()


def merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One delta that says what two consecutive ones say."""
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = [*(first.logprobs or []), *second.logprobs]
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        prompt_token_ids=first.prompt_token_ids or second.prompt_token_ids,
    )
