"""The shape of the repository: sizes, guards, links, and nothing that belongs to one machine."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("runtime", "attention", "router", "experts")

MAX_FILE_LINES = 400
MAX_LONG_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
LONG_FILES = re.compile(r"(^|/)kernels/|_attention\.py$|_routes\.py$")


def tracked_or_new() -> list[Path]:
    """Files git knows or would add; symlinks included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def python_files() -> Iterator[Path]:
    for path in tracked_or_new():
        if path.suffix == ".py" and not path.is_symlink():
            yield path


def test_files_and_functions_stay_small() -> None:
    too_long = []
    for path in python_files():
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        limit = MAX_LONG_FILE_LINES if LONG_FILES.search(name) else MAX_FILE_LINES
        lines = text.count("\n")
        if lines > limit:
            too_long.append(f"{name}: {lines} lines, at most {limit}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    assert not too_long, "\n".join(too_long)


def test_every_module_says_what_it_is() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not bare, bare


def test_no_machine_paths_or_registry_hosts() -> None:
    # Built from pieces, so that this file passes its own test.
    words = [
        "/" + "work/",
        "/" + "home/",
        "/" + "root/",
        "/" + "Users/",
        "pypi" + ".org",
        "pythonhosted" + ".org",
        "download.pytorch" + ".org",
    ]
    pattern = re.compile("|".join(map(re.escape, words)))
    found = []
    for path in tracked_or_new():
        if path.is_symlink() or path.suffix in {".png", ".npz"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_linked_and_guarded(room: str) -> None:
    link = ROOT / "src" / "coterie" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{room}", "the link must be relative"
    guard = (ROOT / room / "__init__.py").read_text()
    assert f'if __name__ != "coterie.{room}":' in guard


def test_folders_re_export_nothing() -> None:
    exporting = []
    for path in python_files():
        if path.name != "__init__.py" or path.parent == ROOT / "src" / "coterie":
            continue
        imports = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        if imports:
            exporting.append(str(path.relative_to(ROOT)))
    assert not exporting, exporting


def test_every_folder_is_a_package() -> None:
    missing = {
        str(path.parent.relative_to(ROOT))
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in ROOMS and not (path.parent / "__init__.py").exists()
    }
    assert not missing, missing


def test_test_file_names_are_unique() -> None:
    names = [
        path.name
        for path in python_files()
        if path.relative_to(ROOT).parts[0] == "tests" and path.name != "conftest.py"
    ]
    assert len(names) == len(set(names))
    assert "__init__.py" not in names


def test_documents_name_files_that_exist() -> None:
    broken = []
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target and not (ROOT / target).exists():
                broken.append(f"{name}: {target}")
        for target in re.findall(r"`((?:runtime|attention|router|experts|tests)/[\w/.]+)`", text):
            if not (ROOT / target).exists():
                broken.append(f"{name}: {target}")
    assert not broken, "\n".join(broken)


def test_lock_covers_what_is_declared() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["dev"]
    normal = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in declared:
        name = re.split(r"[<>=!~\[; ]", requirement)[0]
        assert re.sub(r"[-_.]+", "-", name).lower() in normal, f"{requirement} is not locked"
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()
