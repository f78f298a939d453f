"""Flags of the engine, shared by every command that starts one; vLLM's names where they fit.

A flag that is not given is left out, so the defaults stand in one place: ``runtime.config``.
"""

import argparse
import re
from typing import Any

from coterie.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def byte_size(text: str) -> int:
    """``2GiB``, ``512m``, ``1000000``: a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


_ENGINE_FLAGS: tuple[tuple[str, tuple[tuple[tuple[str, ...], dict[str, Any]], ...]], ...] = (
    (
        "model",
        (
            (("--served-model-name",), {"help": "name in the API; default: the folder's name"}),
            (("--tokenizer",), {"help": "folder or name, as MODEL; default: the model's"}),
            (("--skip-tokenizer-init",), {"action": "store_true", "help": "token ids only"}),
            (("--dtype",), {"choices": ("auto", "bfloat16", "float32")}),
            (
                ("--load-format",),
                {
                    "choices": ("auto", "safetensors", "dummy"),
                    "help": "dummy: seeded random weights, only config.json needed (without a "
                    "tokenizer: token ids only)",
                },
            ),
            (("--max-model-len",), {"type": int, "help": "most tokens of prompt plus output"}),
            (
                ("--seed",),
                {"type": int, "help": "for requests without a seed, and dummy weights"},
            ),
            (("--kernels",), {"choices": ("auto", "numba", "torch"), "help": "compute backend"}),
        ),
    ),
    (
        "KV cache (each attention rank)",
        (
            (("--block-size",), {"type": int, "help": "tokens per block; default 16"}),
            (
                ("--kv-cache-memory-bytes",),
                {"type": byte_size, "metavar": "SIZE", "help": "such as 2GiB"},
            ),
            (
                ("--num-kv-blocks", "--num-gpu-blocks-override"),
                {"type": int, "help": "blocks; overrides the size in bytes"},
            ),
            (("--enable-prefix-caching",), {"action": argparse.BooleanOptionalAction}),
        ),
    ),
    (
        "layout",
        (
            (
                ("-dp", "--data-parallel-size"),
                {"type": int, "help": "N colocated ranks (MoE) or N replicas (dense)"},
            ),
            (("--attention-ranks",), {"type": int, "metavar": "A"}),
            (("--expert-ranks",), {"type": int, "metavar": "E"}),
            (
                ("--disaggregate",),
                {"action": "store_true", "help": "attention and experts on separate ranks"},
            ),
            (
                ("--enable-expert-parallel",),
                {"action": "store_true", "help": "accepted; experts are always spread"},
            ),
            (("-tp", "--tensor-parallel-size"), {"type": int}),
            (("-pp", "--pipeline-parallel-size"), {"type": int}),
            (("--sequence-parallel-size",), {"type": int}),
            (
                ("--num-redundant-experts",),
                {"type": int, "help": "extra physical experts per layer"},
            ),
            (
                ("--distributed-executor-backend",),
                {"choices": ("ray", "mp"), "help": "Ray actors or plain processes"},
            ),
            (("--ray-address",), {"help": "an existing Ray cluster; it is never stopped"}),
            (("--transport",), {"choices": ("auto", "shared_memory", "gloo")}),
        ),
    ),
    (
        "scheduler (each attention rank)",
        (
            (("--max-num-seqs",), {"type": int, "help": "most running requests"}),
            (("--max-num-batched-tokens",), {"type": int, "help": "most rows of one step"}),
            (
                ("--prefill-budget-ms",),
                {"type": float, "help": "predicted time of a step's prefill while others decode"},
            ),
            (("--max-waiting",), {"type": int, "help": "most waiting requests before 429"}),
        ),
    ),
    (
        "deadlines, seconds",
        (
            (("--start-timeout-s",), {"type": float, "dest": "start_s"}),
            (("--fault-deadline-s",), {"type": float, "dest": "fault_s"}),
            (
                ("--orphan-grace-s",),
                {"type": float, "help": "how long ranks outlive a killed server; default 10"},
            ),
            (
                ("--shutdown-timeout-s",),
                {"type": float, "dest": "shutdown_s", "help": "drain and teardown together"},
            ),
        ),
    ),
)


def add_engine_flags(parser: argparse.ArgumentParser, backend: str) -> None:
    """Add MODEL, --model and every engine flag.

    Args:
        backend: launcher of this command unless the user chooses one.
    """
    parser.set_defaults(default_backend=backend)
    parser.add_argument(
        "model_position",
        nargs="?",
        metavar="MODEL",
        help="model folder, or the name of a pulled demo model; default smollm2-moe",
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL")
    for title, flags in _ENGINE_FLAGS:
        group = parser.add_argument_group(title)
        for names, options in flags:
            settings = {"default": argparse.SUPPRESS} | options
            if "--distributed-executor-backend" in names:
                more = "" if backend == "ray" else ", but ray with --ray-address"
                settings["help"] = f"{options['help']}; default {backend}{more}"
            group.add_argument(*names, **settings)


def model_argument(args: argparse.Namespace) -> str | None:
    """The model that was named, if any.

    Raises:
        ConfigError: MODEL and --model name two.
    """
    position, flag = args.model_position, args.model_flag
    if position is not None and flag is not None and position != flag:
        raise ConfigError(f"two models are named: {position} and --model {flag}")
    chosen = position if position is not None else flag
    return None if chosen is None else str(chosen)


def engine_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``engine_config_from_flags``: the flags that were given.

    Raises:
        ConfigError: a layout that is not built.
    """
    given = vars(args)
    flags = {dest: given[dest] for dest in _destinations() if given.get(dest) is not None}
    if flags.pop("sequence_parallel_size", 1) != 1:
        raise ConfigError("--sequence-parallel-size above 1 is not supported; leave it out")
    model = model_argument(args)
    if model is not None:
        flags["model"] = model
    backend = "ray" if "ray_address" in flags else args.default_backend
    flags.setdefault("distributed_executor_backend", backend)
    return flags


def given_engine_flags(args: argparse.Namespace) -> list[str]:
    """Names of the engine flags on the command line, MODEL not among them."""
    given = vars(args)
    return [name for dest, name in _destinations().items() if given.get(dest) is not None]


def refuse_engine_flags(args: argparse.Namespace, place: str) -> None:
    """Engine flags do nothing to a server that runs already.

    Args:
        place: the flag that names the server.

    Raises:
        ConfigError: names the first flag.
    """
    flags = given_engine_flags(args)
    if flags:
        raise ConfigError(f"{flags[0]} is for an engine of its own, not for the server at {place}")


def _destinations() -> dict[str, str]:
    """Flag by destination."""
    names = {}
    for _, flags in _ENGINE_FLAGS:
        for options, settings in flags:
            long = next(name for name in options if name.startswith("--"))
            names[settings.get("dest", long.removeprefix("--").replace("-", "_"))] = long
    return names
