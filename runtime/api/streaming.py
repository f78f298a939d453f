"""Server-sent events, and noticing that a client has gone.

Plain ASGI instead of Starlette's StreamingResponse: the status line waits for the first event, so
a request that fails in the queue gets a proper error status; and a client that disconnects cancels
the work at once, whether or not anything is being sent.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from coterie.errors import CoterieError
from coterie.runtime.api.errors_http import CLIENT_GONE, error_body, error_response
from coterie.runtime.api.frontend import TimedStream
from coterie.runtime.sse import DONE, event

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_STALL_S = 300.0  # a reader that takes nothing for this long is gone
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Run ``work``; cancel it and return None when the client disconnects first.

    The request's body must have been read: the next message is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """A whole response, given up when the client leaves."""
    response = await unless_gone(request.receive, work)
    return Response(status_code=CLIENT_GONE) if response is None else response


class EventStream(StreamingResponse):
    """Sends events as they come; an error after the first event is an event itself.

    Args:
        events: what to send.
        sources: closed when the stream ends, by whatever way: a generator that never began to
            run would not close them itself.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], sources: Sequence[TimedStream]) -> None:
        super().__init__(events, headers=_HEADERS)
        self._events, self._sources = events, sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, receive, send))
        finally:
            for source in self._sources:
                await source.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            try:
                async for chunk in events:
                    if not started:
                        started = True
                        head = {"status": self.status_code, "headers": self.raw_headers}
                        await send({"type": "http.response.start", **head})
                    await _send_body(send, chunk)
            except (TimeoutError, OSError):
                return
            except Exception as error:
                if not isinstance(error, CoterieError):
                    _LOG.exception("a stream failed")
                if not started:
                    await error_response(error)(scope, receive, send)
                    return
                await _send_body(send, event(error_body(error)[1]) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, chunk: bytes) -> None:
    message = {"type": "http.response.body", "body": chunk, "more_body": True}
    async with asyncio.timeout(_STALL_S):
        await send(message)
