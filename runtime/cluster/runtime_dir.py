"""The private folder of a deployment: sockets, logs, and the own Ray head's files.

Paths are short because a unix socket's path may have 107 bytes at most. The folder is 0700 and
belongs to this user; it is removed at shutdown, and by the keeper or the ranks after a kill.
"""

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from coterie.errors import ConfigError

LONGEST_ROOT_BYTES = 24
"""What Ray's socket names leave of the 107 bytes for the part above the deployment's folder."""


def new_deployment_id() -> str:
    return secrets.token_hex(4)


def create(deployment: str) -> Path:
    """Make ``<temporary folder>/coterie-<uid>/<deployment>``.

    Raises:
        ConfigError: the parent belongs to someone else or is open to others.
    """
    parent = _root() / f"coterie-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    info = parent.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(f"{parent} must be a folder of this user with mode 0700: remove it")
    folder = parent / deployment
    folder.mkdir(mode=0o700)
    return folder


def remove(folder: Path | str) -> None:
    """Delete a deployment's folder; what is gone already is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= LONGEST_ROOT_BYTES else Path("/tmp")
