"""The last lines a rank wrote before it died: the only place that says why."""

from pathlib import Path

LOG_TAIL_CHARS = 2000
READ_BYTES = 32 << 10
NOISE = (":job_id:", ":actor_name:", ":task_name:", "Extension modules:")
"""What Ray writes for its own log reader, and a list of thousands of characters after a crash."""


def tail(path: Path) -> str:
    """A further line "its log ends:" and what follows, or nothing if there is no log."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - READ_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    text = "\n".join(line for line in lines if not line.startswith(NOISE)).strip()
    text = text[-LOG_TAIL_CHARS:]
    return f"\nits log ends:\n{text}" if text else ""


def actor_tail(ray_folder: Path, pid: int | None = None) -> str:
    """The same for an actor of an own Ray head.

    Args:
        ray_folder: the head's ``--temp-dir``.
        pid: of the actor, or None for the actor that wrote last.
    """
    logs = ray_folder.glob(f"session_latest/logs/worker-*-{'*' if pid is None else pid}.err")
    written = [path for path in logs if path.stat().st_size]
    return tail(max(written, key=lambda path: path.stat().st_mtime)) if written else ""
