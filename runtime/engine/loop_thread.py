"""An event loop in a thread of its own, for callers that block; it ends before the interpreter.

A thread that is still inside the loop while the interpreter is finalised crashes the process, so
whatever its owner forgets is done at exit. That is after all other (non-daemon) threads have ended,
and ``asyncio.to_thread`` does not work any more by then: nothing that ends an engine may need it.
"""

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from coterie.errors import EngineDead

_T = TypeVar("_T")
UNDO_S = 15.0
"""How long an interrupted call may take to end what it had started."""
JOIN_S = 10.0
_log = logging.getLogger("coterie.engine")


class LoopThread:
    """A running loop; lives until ``close``, which happens at the interpreter's end at the latest.

    Args:
        name: of the thread.
        at_exit: called at the interpreter's end if nobody closed this before; must close it.
    """

    def __init__(self, name: str, at_exit: Callable[[], None]) -> None:
        self._loop = uvloop.new_event_loop()
        self._calls: dict[concurrent.futures.Future[Any], threading.Event] = {}
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        self._at_exit = at_exit
        self._process = os.getpid()
        # Weak, so that what was closed can be collected; until then the thread holds this object,
        # and with it the owner.
        method = weakref.WeakMethod(self._end)
        self._hook = lambda: _call(method())
        atexit.register(self._hook)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run on the loop.

        Raises:
            EngineDead: the loop has ended.

        Blocks: until ``work`` is done; interrupted, until it has undone what it began.
        """
        if not self._thread.is_alive():
            work.close()
            raise EngineDead("this engine was shut down")
        ended = threading.Event()

        async def watched() -> _T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        self._calls[future] = ended
        try:
            return future.result()
        except BaseException:
            # KeyboardInterrupt included: what was begun is undone before the caller goes on.
            future.cancel()
            ended.wait(UNDO_S)
            raise
        finally:
            self._calls.pop(future, None)

    def cancel_calls(self) -> None:
        """Cancel what other threads wait for. Blocks: until it is undone, at most ``UNDO_S``."""
        for future, ended in list(self._calls.items()):
            future.cancel()
            ended.wait(UNDO_S)

    def close(self) -> None:
        """End loop and thread. Safe to call twice. Blocks: up to ``JOIN_S``."""
        atexit.unregister(self._hook)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)

    def _end(self) -> None:
        if os.getpid() != self._process:  # a fork has no such thread and owns no ranks
            return
        try:
            self._at_exit()
        except Exception:
            _log.exception("ending the engine at exit failed")

    def _run_forever(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())
        self._loop.close()


async def _cancel_others() -> None:
    """What is left on the loop would be destroyed in its midst."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=JOIN_S / 2)


def _call(method: Callable[[], None] | None) -> None:
    if method is not None:
        method()
