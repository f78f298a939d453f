"""A rank whose engine has not come yet: it waits while its launcher lives, and not much longer."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from coterie.runtime.engine.plan import make_plan
from coterie.runtime.engine_args import engine_config_from_flags
from coterie.runtime.messages import SeatAddress

DEADLINE_S = 60.0
MANY_GRACES_S = 1.0


def test_a_new_rank_waits_for_its_engine_while_its_launcher_lives(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However short the grace is: other ranks may take long to start."""
    folder = tmp_path_factory.mktemp("rt") / "d"
    folder.mkdir(mode=0o700)
    config = engine_config_from_flags(
        model=tiny_model_dir("llama"), data_parallel_size=1, orphan_grace_s=0.05
    )
    (spec,) = make_plan(config).specs("test", folder, b"t" * 32)
    spec_path = folder / "spec"
    spec_path.write_bytes(msgspec.json.encode(spec))
    launcher = subprocess.Popen(
        [
            "sh",
            "-c",
            '"$0" -m coterie.runtime.rank.main < "$1" & read end',
            sys.executable,
            spec_path,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    with launcher, launcher.stdout as stdout:
        address = msgspec.json.decode(stdout.readline(), type=SeatAddress)
        rank = psutil.Process(address.pid)
        with pytest.raises(psutil.TimeoutExpired):
            rank.wait(MANY_GRACES_S)
        launcher.stdin.close()
        launcher.wait(DEADLINE_S)
        rank.wait(DEADLINE_S)
    assert not folder.exists()
