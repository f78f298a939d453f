"""sdist -> wheel, and the wheel holds every module of the tree: no link and no folder is lost."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "coterie"

pytestmark = pytest.mark.slow

_BUILD_SDIST = (
    "import sys\nfrom setuptools import build_meta\nprint(build_meta.build_sdist(sys.argv[1]))\n"
)


def run(arguments: list[str], cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def package_files(folder: Path) -> set[str]:
    """Modules below ``folder``, links followed (Path.rglob does not)."""
    found = set()
    pending = [folder]
    while pending:
        for path in pending.pop().iterdir():
            if path.is_dir() and path.name != "__pycache__":
                pending.append(path)
            elif path.suffix == ".py" or path.name == "py.typed":
                found.add("coterie/" + str(path.relative_to(folder)))
    return found


@pytest.mark.timeout(600)
def test_wheel_from_sdist_holds_the_whole_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout.split("\0")
    # A copy: building in the checkout would leave build/ and stale file lists behind.
    for name in filter(None, tracked):
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.write_bytes(source.read_bytes())

    command = ["-m", "pip", "wheel", "--no-deps", "--quiet", "--disable-pip-version-check"]
    run(["-m", "venv", str(tmp_path / "venv")], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "setuptools>=77"]
    subprocess.run(install, check=True, timeout=120)
    subprocess.run(
        [str(python), "-c", _BUILD_SDIST, str(tmp_path)], cwd=tree, check=True, timeout=120
    )
    [sdist] = tmp_path.glob("coterie-*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym()]
    run([*command, "--wheel-dir", str(tmp_path), str(sdist)], tmp_path)
    [wheel] = tmp_path.glob("coterie-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    expected = package_files(PACKAGE)
    assert len(expected) > 50
    shipped = {name for name in names if name.startswith("coterie/")}
    assert shipped == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
