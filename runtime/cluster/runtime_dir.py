"""The private folder of a deployment: sockets, logs, and the own Ray head's files.

Paths are short because a unix socket's path may have 107 bytes at most. The folder is 0700 and
belongs to this user; it is removed at shutdown, by the keeper or the ranks after a kill of the
engine, and by the next start if all of them were killed.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.runtime.rank.hold import hold, is_held

LONGEST_ROOT_BYTES = 24
"""What Ray's socket names leave of the 107 bytes for the part above the deployment's folder."""
UNHELD_S = 3600.0
"""Age at which a folder that nobody ever held counts as left behind."""
_OURS = re.compile(r"[0-9a-f]{8}")


def new_deployment_id() -> str:
    return secrets.token_hex(4)


@dataclass
class RuntimeDir:
    """A folder that this process holds."""

    path: Path
    descriptor: int

    def remove(self) -> None:
        """Let go of it and delete it. Safe to call twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            remove(self.path)


def create(deployment: str) -> RuntimeDir:
    """Make ``<temporary folder>/coterie-<uid>/<deployment>``.

    Raises:
        ConfigError: the parent belongs to someone else or is open to others.
    """
    parent = _parent()
    with _locked(parent):  # nobody may see the folder before it is held
        folder = parent / deployment
        folder.mkdir(mode=0o700)
        return RuntimeDir(folder, hold(folder))


def sweep() -> None:
    """Delete what is left of deployments of this user of which no process lives.

    Raises:
        ConfigError: as ``create``.
    """
    parent = _parent()
    with _locked(parent):
        for folder in parent.iterdir():
            if not _OURS.fullmatch(folder.name) or folder.is_symlink():
                continue
            with contextlib.suppress(OSError):
                held = is_held(folder)
                old = time.time() - folder.stat().st_mtime > UNHELD_S
                if held is False or (held is None and old):
                    remove(folder)


def _parent() -> Path:
    parent = _root() / f"coterie-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    info = parent.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(f"{parent} must be a folder of this user with mode 0700: remove it")
    return parent


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # others hold it for a sweep: moments
        yield
    finally:
        os.close(descriptor)


def remove(folder: Path | str) -> None:
    """Delete a deployment's folder; what is gone already is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= LONGEST_ROOT_BYTES else Path("/tmp")
