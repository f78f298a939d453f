"""The decorator of every numba kernel: no GIL, compiled once per machine, cached on disk.

Kernels take addresses and sizes (int64) and numbers (float64) only, so each has one signature:
two processes that compile it at the same time write the same thing, atomically.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba

_SOURCES = (
    Path(__file__).parent,
    Path(__file__).parents[2] / "attention",
)


def cache_dir() -> Path:
    """Folder of compiled kernels in the user's cache, one per version of the kernels' source.

    numba looks at the file of the outermost function only; a change in what it calls would go
    unseen, hence the digest.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(folder.glob("*.py")):
            if path.name.startswith(("numba_", "vector_")):
                digest.update(path.read_bytes())
    return Path(base) / "coterie" / "numba" / digest.hexdigest()[:16]


def _usable_cache_dir() -> Path | None:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # compile in memory, every process anew
    return folder if os.access(folder, os.W_OK) else None


_CACHE_DIR = _usable_cache_dir()


@contextmanager
def one_compiles(deadline_s: float = 60.0) -> Iterator[None]:
    """Let one process of this machine compile while the others wait to load its result.

    Blocks: at most ``deadline_s``; after that this process compiles for itself, which is safe.
    """
    if _CACHE_DIR is None:
        yield
        return
    with open(_CACHE_DIR / "lock", "w") as file:
        give_up = time.monotonic() + deadline_s
        while time.monotonic() < give_up:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # held by another process, or a file system without locks
                time.sleep(0.02)
        yield


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first call, releasing the GIL while it runs.

    No fastmath: the order of every sum is the one written down.
    """
    if _CACHE_DIR is None:
        return numba.njit(nogil=True, error_model="numpy")(function)
    # numba has no argument for the folder; it reads the setting when a kernel is defined.
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_CACHE_DIR)
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
