"""An own Ray head for one deployment: free ports, token, no dashboard, nothing in /dev/shm.

Used by the keeper only. Every process of the head, the rank actors included, stays in the session
of whoever started it, so ending that session ends all of it.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from coterie.errors import PlacementError

OBJECT_STORE_BYTES = 80_000_000
"""Ray's minimum is 75 MB; no tensor of ours travels through it."""
PR_SET_PDEATHSIG = 1
READY = "--block"
"""In what Ray prints last, once it is up and has written its address down."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A node that no other may join: only then does Ray keep the 127.0.0.1 that it is given, and its
servers listen there instead of on all interfaces."""


class RayHead:
    """The process ``ray start --head --block`` and what it starts.

    Args:
        folder: made here, for all of Ray's files; the token lies beside it.
        new_session: give it a session of its own instead of the caller's.
        loopback: other hosts cannot reach it.
    """

    def __init__(
        self, folder: Path, num_cpus: int, *, new_session: bool = False, loopback: bool = True
    ) -> None:
        self._folder = folder
        self._num_cpus = num_cpus
        self._new_session = new_session
        self._environment = LOOPBACK if loopback else {}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it; it is ready when ``address`` returns."""
        self._folder.mkdir(mode=0o700)
        command = [
            *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", "0"),
            *("--include-dashboard", "false", "--include-log-monitor", "false", "--no-monitor"),
            "--disable-usage-stats",
            *("--num-cpus", str(self._num_cpus), "--num-gpus", "0"),
            *("--object-store-memory", str(OBJECT_STORE_BYTES)),
            # In the deployment's folder, so that nothing of it can be left in /dev/shm.
            *("--plasma-directory", str(self._folder), "--temp-dir", str(self._folder)),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | self._environment | authentication(self._folder.parent),
            preexec_fn=_end_with_parent,
            start_new_session=self._new_session,
        )

    def address(self) -> str:
        """Address for ``ray.init``, once the head is ready.

        Raises:
            PlacementError: it did not start; with what Ray printed.

        Blocks: about 4 s; ends when the process ends. The caller keeps the deadline.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        printed: list[str] = []
        for line in self._process.stdout:
            printed.append(line)
            if READY in line:
                return (self._folder / "ray_current_cluster").read_text().strip()
        raise PlacementError("the Ray head did not start:\n" + "".join(printed[-20:]))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def wait(self) -> None:
        """Blocks until the head's process ended; reads what it prints so that it never blocks."""
        assert self._process is not None
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            pass
        self._process.wait()


def authentication(runtime_dir: Path) -> dict[str, str]:
    """Environment that makes Ray ask for and show this deployment's token.

    Ray's servers run what they are sent, so without the token anybody who reaches them, such as
    another user of this host, could run code here.
    """
    path = runtime_dir / "ray.token"
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def session_members(session: int) -> list[int]:
    """Pids of all live processes of a session, the leader included."""
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    members.append(int(name))
    return members


def kill_session(session: int, spare: int | None = None) -> bool:
    """Kill every process of a session but ``spare``; whether any was left."""
    left = [pid for pid in session_members(session) if pid != spare]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def end_session(session: int, deadline_s: float = 10.0, spare: int | None = None) -> None:
    """``kill_session``. Blocks until they are gone."""
    end = time.monotonic() + deadline_s
    while kill_session(session, spare) and time.monotonic() < end:
        time.sleep(0.02)


def _end_with_parent() -> None:
    """If the keeper is killed, Ray's own supervisor gets SIGTERM and ends the rest."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
