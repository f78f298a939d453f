"""``coterie plan``: which layout suits a model on given devices, from its config.json alone."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from coterie.errors import ConfigError
from coterie.runtime.model_store import resolve_model
from coterie.runtime.planner.device import GIB, resolve_device
from coterie.runtime.planner.families import read_shape
from coterie.runtime.planner.plan import plan
from coterie.runtime.planner.report import show
from coterie.runtime.planner.shape import ModelShape
from coterie.runtime.planner.workload import Cluster, Workload

DEFAULT_CONTEXT = 8192


def run(args: argparse.Namespace) -> int:
    shape = _shape(args.model, args.dtype)
    device = resolve_device(args.device, args.devices)
    reserve = device.reserve_bytes if args.reserve_gib is None else round(args.reserve_gib * GIB)
    made = plan(
        shape,
        Cluster(device=device, devices_per_node=args.devices, nodes=args.nodes),
        Workload(
            context=args.context or min(DEFAULT_CONTEXT, shape.max_position_embeddings or 1 << 30),
            concurrency=args.concurrency,
            memory_utilization=args.memory_utilization,
            reserve_bytes=reserve,
            num_parameters=None if args.num_parameters is None else round(args.num_parameters),
            slo_ttft_s=args.slo_ttft,
            slo_tpot_ms=args.slo_tpot,
        ),
    )
    if args.json:
        print(json.dumps(made.describe()))
    else:
        # Reasons are sentences: a table in a file needs room for them.
        show(made, Console() if sys.stdout.isatty() else Console(width=200))
    return 0


def _shape(model: str, dtype: str) -> ModelShape:
    path = Path(model).expanduser()
    if path.is_file():
        return read_shape(path, dtype)
    if path.suffix == ".json":
        raise ConfigError(f"{path} is not there: give a config.json, a model folder or its name")
    return read_shape(resolve_model(model), dtype)
