"""What importing costs and refuses, each case in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("room", ["runtime", "attention", "router", "experts"])
def test_a_bare_room_is_refused(room: str) -> None:
    # In the repository root the four folders are importable by accident: two copies of each class.
    result = run(f"import {room}", ROOT)
    assert result.returncode != 0
    assert f"coterie.{room}" in result.stderr.splitlines()[-1]


def test_the_sdk_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys, coterie\n"
        "coterie.Client, coterie.AsyncClient, coterie.SamplingParams, coterie.GenerateRequest\n"
        "heavy = {'torch', 'ray', 'transformers', 'numba', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))\n"
    )
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_resolving_a_model_name_is_cheap(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from coterie.runtime.model_store import resolve_model\n"
        "print(sorted({'torch', 'ray', 'transformers', 'gguf'} & set(sys.modules)))\n"
    )
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_public_names_are_listed_and_importable() -> None:
    import coterie

    assert coterie.__all__ == sorted(coterie.__all__, key=lambda name: (not name.isupper(), name))
    for name in coterie.__all__:
        assert getattr(coterie, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = coterie.no_such_name
