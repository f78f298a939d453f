"""Loading: from weights on disk to a router and, on attention ranks, a step loop."""

import gc
from collections.abc import Callable, Sequence

from coterie.attention.block_pool import BlockPool
from coterie.router.token_router import TokenRouter
from coterie.router.transports.base import Transport
from coterie.runtime.messages import Message, SeatAddress
from coterie.runtime.rank.cost_model import CostModel
from coterie.runtime.rank.model_runner import LocalModel, Progress
from coterie.runtime.rank.scheduler import Scheduler
from coterie.runtime.rank.step_loop import StepLoop
from coterie.runtime.spec import RankSpec


def load(
    spec: RankSpec,
    model: LocalModel,
    transport: Transport,
    members: Sequence[SeatAddress],
    progress: Progress,
    send: Callable[[Message], None],
) -> tuple[TokenRouter, StepLoop | None]:
    """Read this rank's part of the model and compile its kernels.

    Returns:
        the router, and the step loop of an attention rank.

    Raises:
        CheckpointError, ConfigError: what to change.

    Blocks: seconds to minutes, calling ``progress`` in between.
    """
    model.load_experts(progress)
    router = TokenRouter(
        seat=spec.seat,
        placement=spec.placement,
        attention_seats=spec.attention_seats,
        transport=transport,
        experts=model.experts,
        kernels=model.kernels,
        moe=model.config.moe,
        dtype=model.dtype,
        fault_s=spec.config.timeouts.fault_s,
    )
    loop = _make_loop(spec, model, router, members, progress, send)
    # Weights and code live as long as the process: no collection needs to look at them, and none
    # may start inside a step.
    gc.collect()
    gc.freeze()
    gc.disable()
    return router, loop


def _make_loop(
    spec: RankSpec,
    model: LocalModel,
    router: TokenRouter,
    members: Sequence[SeatAddress],
    progress: Progress,
    send: Callable[[Message], None],
) -> StepLoop | None:
    if "attention" not in spec.roles:
        return None
    nodes = {member.seat: member.node for member in members}
    num_ranks_here = sum(nodes.get(seat) == nodes[spec.seat] for seat in spec.attention_seats)
    runner = model.load_runner(router, num_ranks_here, progress)
    cache = spec.config.cache
    pool = BlockPool(
        runner.num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching
    )
    scheduler = Scheduler(pool, spec.config.scheduler, spec.max_model_len, CostModel())
    return StepLoop(seat=spec.seat, scheduler=scheduler, runner=runner, router=router, send=send)
