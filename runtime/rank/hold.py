"""Whether anybody lives in a deployment's private folder: a shared lock on a file in it.

The engine, the keeper and every rank hold it for as long as they live. The kernel lets go of it
however a process ends, and a new process with an old pid does not have it.
"""

import fcntl
import os

LOCK_NAME = "lock"


def hold(folder: str | os.PathLike[str]) -> int:
    """Mark this process as living in ``folder``; returns the descriptor to close, if ever.

    Raises:
        OSError: there is no such folder any more.
    """
    path = os.path.join(folder, LOCK_NAME)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(folder: str | os.PathLike[str]) -> bool | None:
    """Whether a live process holds ``folder``; None if no process ever did."""
    try:
        descriptor = os.open(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
