"""Waiting for file descriptors with microsecond timeouts."""

import math
import select
import time
from collections.abc import Sequence

SELECT_LIMIT = 1024
"""FD_SETSIZE: select() cannot watch higher descriptors."""


def readable(fds: Sequence[int], timeout_s: float) -> list[int]:
    """The descriptors that are readable or closed, after at most ``timeout_s``.

    select() takes microseconds, poll() only milliseconds, so short waits prefer the former.
    """
    if not fds:
        if timeout_s > 0:
            time.sleep(timeout_s)
        return []
    if max(fds) < SELECT_LIMIT:
        return select.select(fds, (), (), timeout_s)[0]
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(math.ceil(timeout_s * 1000))]


def wait_writable(fd: int, timeout_s: float) -> bool:
    """Wait until ``fd`` takes data; False after ``timeout_s``."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(math.ceil(timeout_s * 1000)))
