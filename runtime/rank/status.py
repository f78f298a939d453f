"""The answer to QueryStatus, put together from what the parts of a rank count."""

import os
import time

from coterie.router.token_router import TokenRouter
from coterie.runtime.messages import RankStatus
from coterie.runtime.rank.heartbeat import Vitals
from coterie.runtime.rank.model_runner import LocalModel
from coterie.runtime.rank.step_loop import StepLoop


def rank_status(
    vitals: Vitals,
    model: LocalModel | None,
    router: TokenRouter | None,
    loop: StepLoop | None,
) -> RankStatus:
    """Of a rank in any state: what is not there yet counts as 0 or empty."""
    experts = model.experts if model is not None else None
    pool = loop.scheduler.block_pool if loop is not None else None
    age_s = None
    if loop is not None and loop.last_commit_s is not None:
        age_s = time.monotonic() - loop.last_commit_s
    counters = loop.counters() if loop is not None else {}
    return RankStatus(
        seat=vitals.seat,
        pid=os.getpid(),
        epoch=vitals.epoch,
        step=router.step if router is not None else 0,
        state=vitals.state,
        last_commit_age_s=age_s,
        kv_blocks_free=pool.num_incoming if pool is not None else 0,
        kv_blocks_total=pool.num_blocks if pool is not None else 0,
        expert_layers=experts.num_layers if experts is not None else 0,
        physical_ids=list(experts.physical_ids) if experts is not None else [],
        expert_tokens=router.expert_tokens() if router is not None else [],
        counters=counters | (router.counters() if router is not None else {}),
        gate_tokens=router.gate_tokens() if router is not None else [],
    )
