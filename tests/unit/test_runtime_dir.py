"""The private folders of deployments: whose processes are gone goes, everything else stays."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.runtime.cluster import runtime_dir

HOLDER = """
import sys
from coterie.runtime.rank.hold import hold
hold(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runtime_dir, "LONGEST_ROOT_BYTES", 200)
    return tmp_path / f"coterie-{os.getuid()}"


def test_a_sweep_takes_only_what_nobody_lives_in(parent: Path) -> None:
    live = runtime_dir.create(runtime_dir.new_deployment_id())
    killed = runtime_dir.create(runtime_dir.new_deployment_id())
    (killed.path / "ray" / "session").mkdir(parents=True)
    (killed.path / "ray" / "session" / "log").write_text("x")
    os.close(killed.descriptor)
    # A rank that outlives the engine that made the folder.
    orphaned = runtime_dir.create(runtime_dir.new_deployment_id())
    rank = subprocess.Popen(
        [sys.executable, "-c", HOLDER, orphaned.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rank.stdin is not None
    assert rank.stdout is not None
    assert rank.stdout.readline()
    os.close(orphaned.descriptor)
    never_held, old = parent / "0123abcd", parent / "0123abce"
    for folder in (never_held, old, parent / "somebody-else"):
        folder.mkdir()
    os.utime(old, (1.0, 1.0))
    os.utime(parent / "somebody-else", (1.0, 1.0))

    runtime_dir.sweep()
    kept = {live.path.name, orphaned.path.name, "0123abcd", "somebody-else"}
    assert set(os.listdir(parent)) == kept
    rank.kill()
    rank.wait(10.0)
    rank.stdin.close()
    rank.stdout.close()
    runtime_dir.sweep()
    assert set(os.listdir(parent)) == kept - {orphaned.path.name}
    live.remove()
    live.remove()
    assert not live.path.exists()


def test_an_open_parent_is_refused(parent: Path) -> None:
    parent.mkdir(mode=0o755)
    for use in (runtime_dir.sweep, lambda: runtime_dir.create("0123abcd")):
        with pytest.raises(ConfigError, match="mode 0700"):
            use()
