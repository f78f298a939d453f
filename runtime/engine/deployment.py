"""Starts and ends what an engine stands on: plan, ranks, tokenizer, the private folder."""

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.runtime.cluster import runtime_dir
from coterie.runtime.cluster.launch import make_launcher
from coterie.runtime.cluster.runtime_dir import RuntimeDir
from coterie.runtime.cluster.supervisor import ProgressCallback, Supervisor
from coterie.runtime.config import EngineConfig
from coterie.runtime.engine.plan import DeploymentPlan, load_tokenizer, make_plan
from coterie.runtime.rank.peers import versions
from coterie.runtime.tokenizer import Tokenizer

MIN_TEARDOWN_S = 2.0


@dataclass(frozen=True)
class Deployment:
    """A plan whose ranks are loaded and wait for ``Supervisor.serve``."""

    plan: DeploymentPlan
    supervisor: Supervisor
    tokenizer: Tokenizer | None
    runtime_dir: RuntimeDir

    @property
    def folder(self) -> Path:
        return self.runtime_dir.path

    async def stop(self, deadline_s: float) -> None:
        """End all ranks and remove the folder. Safe to call twice."""
        try:
            await self.supervisor.stop(max(MIN_TEARDOWN_S, deadline_s))
        finally:
            self.runtime_dir.remove()


async def start_deployment(config: EngineConfig, progress: ProgressCallback | None) -> Deployment:
    """Check everything, then start ranks and load the model.

    Raises:
        ConfigError: the configuration cannot work.
        RuntimeFailure: starting failed. In both cases nothing is left running.

    Blocks: up to ``timeouts.start_s``.
    """
    plan = await asyncio.to_thread(make_plan, config)
    launcher = make_launcher(config)
    deployment = runtime_dir.new_deployment_id()
    await asyncio.to_thread(runtime_dir.sweep)
    folder = runtime_dir.create(deployment)
    specs = plan.specs(deployment, folder.path, secrets.token_bytes(32))
    supervisor = Supervisor(specs, launcher, config.timeouts, versions(specs[0]), progress)
    # The tokenizer's imports take seconds; ranks start meanwhile.
    tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, plan))
    ranks = asyncio.create_task(supervisor.start())
    try:
        await asyncio.wait([tokenizer, ranks], return_when=asyncio.FIRST_EXCEPTION)
        if tokenizer.done():
            tokenizer.result()
        await ranks
        return Deployment(plan, supervisor, await tokenizer, folder)
    except BaseException:
        # In a task of its own: a second cancellation must not leave processes behind.
        undone = asyncio.create_task(_abandon([ranks, tokenizer], supervisor, folder))
        await asyncio.wait([undone])
        raise


async def _abandon(
    tasks: "list[asyncio.Task[Any]]", supervisor: Supervisor, folder: RuntimeDir
) -> None:
    for task in tasks:
        task.cancel()
    # What they raise is a consequence, or the error that is on its way to the caller already.
    await asyncio.gather(*tasks, return_exceptions=True)
    with contextlib.suppress(Exception):
        await supervisor.stop(0.0)
    folder.remove()
