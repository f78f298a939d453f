"""Whom the supervisor blames, and what it says about it. Ranks are messages here, no processes."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from coterie.errors import RankDied, RuntimeFailure
from coterie.runtime.cluster.launcher import DeathNotice
from coterie.runtime.cluster.seat import Seat, quietest_expert
from coterie.runtime.cluster.supervisor import Supervisor
from coterie.runtime.config import EngineConfig, TimeoutConfig
from coterie.runtime.messages import Failed, Heartbeat, SeatAddress, StepOutput
from coterie.runtime.spec import RankSpec

FAULT_S = 0.8
WAIT_S = 10.0
BEAT_S = 0.1


def _spec(seat: int, *roles: str) -> RankSpec:
    return RankSpec(
        deployment="test",
        seat=seat,
        roles=roles,
        attention_seats=(0, 1),
        expert_seats=(2, 3),
        placement=None,
        config=EngineConfig(),
        model_dir="",
        max_model_len=8,
        eos_token_ids=(),
        runtime_dir="",
        token=b"",
    )


SPECS = [_spec(0, "attention"), _spec(1, "attention"), _spec(2, "experts"), _spec(3, "experts")]


class NoProcesses:
    async def start(
        self, specs: Sequence[RankSpec], on_death: DeathNotice, deadline_s: float
    ) -> list[SeatAddress]:
        return []

    async def kill(self, seat: int) -> None: ...

    async def stop(self, deadline_s: float) -> None: ...


class Lost:
    """The engine's end: which ranks it heard of."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, str]] = []
        self.news = asyncio.Event()

    def on_step(self, output: StepOutput) -> None: ...

    def on_requests_failed(self, seat: int, request_ids: list[str], error: Exception) -> None: ...

    def on_rank_lost(self, seat: int, error: RuntimeFailure) -> None:
        self.ranks.append((seat, str(error)))
        self.news.set()


def _beat(seat: int, tick: int, state: str) -> Heartbeat:
    return Heartbeat(seat=seat, epoch=1, step=7, layer=0, tick=tick, state=state)


async def _play(silent: Sequence[int], stuck: Sequence[int] = (), gone: int | None = None) -> Lost:
    """Seat 0 reports a dead peer while the others beat; until the supervisor has judged."""
    supervisor = Supervisor(SPECS, NoProcesses(), TimeoutConfig(fault_s=FAULT_S), {})
    lost = Lost()
    supervisor.serve(lost)
    states = {0: "failed", 1: "stepping", 2: "serving", 3: "idle"}
    supervisor._on_message(Failed(0, 1, 7, "RankDied", "seat 0: a peer did not answer"))
    if gone is not None:
        supervisor._on_link_lost(gone, "connection closed")
    try:
        async with asyncio.timeout(WAIT_S):
            tick = 0
            while not lost.news.is_set():
                tick += 1
                for seat, state in states.items():
                    if seat not in silent:
                        moved = 0 if seat in stuck else tick
                        supervisor._on_message(_beat(seat, moved, state))
                await asyncio.sleep(BEAT_S)
    finally:
        await supervisor.stop(0.0)
    return lost


async def test_the_silent_rank_is_the_dead_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "coterie.cluster"):
        lost = await _play(silent=[3])
    ((seat, text),) = lost.ranks
    assert seat == 3
    assert text.startswith("rank 3 is silent for")
    assert "reported by rank 0 (step 7, epoch 1): seat 0: a peer did not answer" in text
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "lost rank 3" in record.getMessage()
    assert "epoch 1" in record.getMessage()


async def test_a_rank_that_beats_but_stands_still_is_the_dead_one() -> None:
    lost = await _play(silent=[], stuck=[2])
    assert [(seat, text[:16]) for seat, text in lost.ranks] == [(2, "rank 2 is stuck ")]


async def test_a_silent_attention_rank_is_not_what_a_step_waits_for() -> None:
    """Seat 1 hangs too, but nobody needs it for a step."""
    lost = await _play(silent=[1, 3])
    assert lost.ranks[0][0] == 3


async def test_a_closed_connection_is_better_evidence() -> None:
    lost = await _play(silent=[], gone=2)
    ((seat, text),) = lost.ranks
    assert (seat, text) == (2, "rank 2 died: connection closed (step 7, epoch 1)")


async def test_the_witness_is_blamed_last() -> None:
    lost = await _play(silent=[])
    ((seat, text),) = lost.ranks
    assert seat == 0
    assert "a peer did not answer" in text


def test_states_in_which_a_rank_may_stand_still() -> None:
    seat = Seat(SPECS[2])
    seat.beat(_beat(2, 5, "warming"), 10.0)
    seat.beat(_beat(2, 5, "warming"), 20.0)
    assert seat.quiet_s(20.0) == 0.0
    seat.beat(_beat(2, 6, "idle"), 21.0)
    seat.beat(_beat(2, 6, "idle"), 24.0)
    assert seat.quiet_s(24.5) == 3.5
    assert seat.complaint(24.5, 1) == "rank 2 is stuck for 3.5 s (step 7, epoch 1)"
    assert quietest_expert([seat], seat, 25.0) is None
    seat.lost = RankDied("gone")
    assert quietest_expert([seat], Seat(SPECS[0]), 25.0) is None
