"""``coterie bench``: a sweep over concurrency against an own engine or an OpenAI server."""

import argparse
import asyncio
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

import coterie
from coterie.errors import ConfigError, RuntimeFailure
from coterie.runtime.api.cli_flags import engine_flags, model_argument, refuse_engine_flags
from coterie.runtime.api.cli_output import StartProgress, table_console
from coterie.runtime.bench import report
from coterie.runtime.bench.load import Target, engine_target, http_target, run_load
from coterie.runtime.bench.plot import write_plot
from coterie.runtime.bench.workload import Workload, arrivals, prompts_from_file, random_prompts
from coterie.runtime.request import SamplingParams

_UNKNOWN_VOCAB = 1000
"""Ids a foreign server's vocabulary surely has."""


def run(args: argparse.Namespace) -> int:
    levels = concurrency_levels(args.concurrency)
    check(args)
    figures = asyncio.run(_bench(args, levels))
    return 1 if any(level["failed"] for level in figures) else 0


def check(args: argparse.Namespace) -> None:
    """Refuse before a model is loaded what could not run, or not be written, once it is.

    Raises:
        ConfigError, InvalidRequest: says which flag.
    """
    if min(args.input_len, args.output_len) < 1:
        raise ConfigError("--input-len and --output-len must be positive")
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be positive, got {args.num_prompts}")
    if args.request_rate is not None and not args.request_rate > 0:
        raise ConfigError(f"--request-rate must be positive, got {args.request_rate}")
    if args.prompts_file:
        prompts_from_file(args.prompts_file, 1)
    SamplingParams(temperature=args.temperature, max_tokens=args.output_len).check_ranges()
    try:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: {error}") from error


def concurrency_levels(text: str) -> list[int]:
    """``1,4,16``.

    Raises:
        ConfigError: not a list of positive numbers.
    """
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise ConfigError(f"--concurrency must be a list such as 1,4,16, got {text!r}")
    return levels


async def _bench(args: argparse.Namespace, levels: list[int]) -> list[dict[str, Any]]:
    if args.base_url:
        refuse_engine_flags(args, "--base-url")
        return await _bench_url(args, levels)
    from coterie.runtime.engine.engine import AsyncEngine
    from coterie.runtime.engine_args import engine_config_from_flags

    flags = engine_flags(args)
    config = engine_config_from_flags(**flags)
    with StartProgress() as progress:
        engine = await AsyncEngine.start(config, progress)
    try:
        ranks = (await engine.status())["ranks"]
        pids = [os.getpid(), *(rank["pid"] for rank in ranks if rank["pid"])]
        with report.MemoryWatch(lambda: pids) as memory:
            return await _sweep(
                args,
                levels,
                engine_target(engine),
                engine.model_config.vocab_size,
                {"target": "engine", "model": engine.served_model_name, "flags": flags},
                memory.take_peak,
            )
    finally:
        await engine.shutdown(config.timeouts.shutdown_s)


async def _bench_url(args: argparse.Namespace, levels: list[int]) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=httpx.Timeout(600.0), limits=limits
    ) as client:
        card = await _model_card(client, model_argument(args))
        vocab_size = card.get("vocab_size") or _UNKNOWN_VOCAB
        settings = {"target": base_url, "model": card["id"]}
        target = http_target(client, card["id"])
        return await _sweep(args, levels, target, vocab_size, settings, None)


async def _model_card(client: httpx.AsyncClient, model: str | None) -> dict[str, Any]:
    try:
        reply = await client.get("/v1/models")
        cards = reply.raise_for_status().json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise RuntimeFailure(f"no OpenAI server answers at {client.base_url}: {error}") from error
    for card in cards:
        if model is None or card["id"] == model:
            return dict(card)
    raise ConfigError(f"{client.base_url} does not serve {model!r}")


async def _sweep(
    args: argparse.Namespace,
    levels: list[int],
    target: Target,
    vocab_size: int,
    settings: dict[str, Any],
    take_peak: Callable[[], int] | None,
) -> list[dict[str, Any]]:
    console = Console(stderr=True)
    seed = args.workload_seed
    warm_up = await run_load(target, _workload(args, 1, vocab_size, seed - 1), 1)
    if warm_up[0].error is not None:
        raise RuntimeFailure(f"the first request failed: {warm_up[0].error}")
    figures: list[dict[str, Any]] = []
    for index, concurrency in enumerate(levels):
        count = args.num_prompts or max(8, 4 * concurrency)
        console.print(f"concurrency {concurrency}: {count} requests", markup=False)
        workload = _workload(args, count, vocab_size, seed + index)
        if take_peak is not None:
            take_peak()
        records = await run_load(target, workload, concurrency)
        figures.append(
            report.summarize(records, concurrency, take_peak() if take_peak is not None else None)
        )
    settings |= {
        "input_len": None if args.prompts_file else args.input_len,
        "prompts_file": args.prompts_file,
        "output_len": args.output_len,
        "ignore_eos": args.ignore_eos,
        "temperature": args.temperature,
        "request_rate": args.request_rate,
        "seed": seed,
        "coterie": coterie.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }
    report.print_table(figures, table_console())
    base = Path(args.output)
    written = [base.with_name(f"{base.name}{suffix}") for suffix in (".json", ".png")]
    report.write_json(written[0], settings, figures)
    write_plot(written[1], str(settings["model"]), figures)
    for path in written:
        console.print(f"wrote {path.absolute()}", markup=False, soft_wrap=True)
    return figures


def _workload(args: argparse.Namespace, count: int, vocab_size: int, seed: int) -> Workload:
    if args.prompts_file:
        prompts = prompts_from_file(args.prompts_file, count)
    else:
        prompts = random_prompts(count, args.input_len, vocab_size, seed)
    return Workload(
        prompts=prompts,
        output_len=args.output_len,
        arrivals_s=arrivals(count, args.request_rate, seed),
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
    )
