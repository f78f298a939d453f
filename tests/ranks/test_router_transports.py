"""Both transports and the expert server, two ends in one process."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import EpochChanged, HandshakeError, RankDied
from coterie.experts.config import MoEConfig
from coterie.experts.grouped import GroupedExperts
from coterie.experts.kernels.select import select_kernels
from coterie.experts.placement import ExpertPlacement
from coterie.experts.rows import RowBuffer, Rows
from coterie.router.counters import RouterCounters
from coterie.router.expert_server import ExpertServer
from coterie.router.gate import TopKGate, TopKOutput
from coterie.router.moe_layer import MoELayer
from coterie.router.reference import all_gather_moe
from coterie.router.state import SeatState, StepKind
from coterie.router.token_router import TokenRouter
from coterie.router.transports.base import GONE, RoundShape
from coterie.router.transports.distributed import DistributedTransport
from coterie.router.transports.local import LocalTransport
from coterie.router.transports.shared_memory import SharedMemoryTransport
from coterie.router.wait import Waiter

HIDDEN = 8
Pair = tuple[Any, Any]
MakePair = Callable[..., Pair]


@pytest.fixture(params=["shared_memory", "gloo"])
def make_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakePair]:
    opened: list[Any] = []

    def make(second: dict[str, Any] | None = None, epoch: int = 3, **shape: Any) -> Pair:
        ends = socket.socketpair()

        def end(seat: int) -> Any:
            changes = dict(second or {}) if seat == 1 else {}
            facts = dict(hidden_size=HIDDEN, top_k=2, dtype=torch.float32, max_rows=8) | shape
            facts["max_rows"] = changes.pop("max_rows", facts["max_rows"])
            arguments: dict[str, Any] = dict(
                seat=seat, epoch=epoch, links={1 - seat: ends[seat]}, attention_seats=(0, 1)
            )
            arguments.update(expert_seats=(0, 1), shape=RoundShape(**facts), deadline_s=5.0)
            arguments.update(changes)
            if request.param == "gloo":
                return DistributedTransport.create(**arguments, store_dir=str(tmp_path))
            return SharedMemoryTransport.create(**arguments)

        with ThreadPoolExecutor(2) as threads:
            pair = [threads.submit(end, seat) for seat in (0, 1)]
        errors = [future.exception() for future in pair]
        opened.extend(future.result() for future in pair if not future.exception())
        if any(errors):
            raise next(error for error in errors if error)
        return pair[0].result(), pair[1].result()

    yield make
    for transport in opened:
        transport.close()


def rows(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (num_tokens, 2), generator=g, dtype=torch.int32)
    return torch.randn(num_tokens, HIDDEN, generator=g), ids, torch.rand(num_tokens, 2, generator=g)


def parts(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rows.hidden_states, rows.topk_ids, rows.topk_weights


def post(
    transport: Any, peer: int, layer: int, sent: Sequence[torch.Tensor], *, big: bool = False
) -> int:
    """Write rows to the reserved place and post them."""
    count = len(sent[0])
    for place, tensor in zip(parts(Rows(transport.reserve(peer, count), count)), sent, strict=True):
        place.copy_(tensor)
    return transport.post(peer, layer, count, big=big)


def until(transport: Any, probe: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 5.0
    while (value := probe()) is None:
        assert time.monotonic() < deadline, "nothing arrived"
        transport.block(0.01)
    return value


def test_round_and_reply(make_pair: MakePair) -> None:
    a, b = make_pair()
    for count in (1, 8, 3, 5):
        sent = rows(count, count)
        sequence = post(a, 1, count, sent, big=count == 8)
        round = until(b, lambda: b.poll(0))
        assert b.poll(0) is round
        assert (round.header.layer, round.header.source) == (count, 0)
        assert (round.header.sequence, round.header.big) == (sequence, count == 8)
        assert all(torch.equal(x, y) for x, y in zip(sent, parts(round.rows), strict=True))
        assert a.poll_reply(1, sequence) is None
        round.rows.out.copy_(round.rows.hidden_states * 2)
        b.reply(round)
        assert b.poll(0) is None
        assert torch.equal(until(a, lambda s=sequence: a.poll_reply(1, s)), sent[0] * 2)
        a.release(1, sequence)


def test_published_state_follows_rounds(make_pair: MakePair) -> None:
    a, b = make_pair()
    state = SeatState(epoch=3, step=9, layer=2, kind=StepKind.DECODE)
    post(a, 1, 1, rows(2))
    a.publish(state)
    until(b, lambda: b.peer_state(0) == state or None)
    assert b.poll(0) is not None


@pytest.mark.parametrize(("field", "value"), [("epoch", 4), ("max_rows", 16)])
def test_ends_that_differ_refuse(make_pair: MakePair, field: str, value: int) -> None:
    with pytest.raises(HandshakeError, match=f"seat 0 and seat 1 differ in {field}|seat 1 and"):
        make_pair(second={field: value})


def test_old_rounds_are_dropped_and_newer_held(make_pair: MakePair) -> None:
    a, b = make_pair()
    a.epoch = 2
    post(a, 1, 0, rows(1))
    a.epoch = 4
    post(a, 1, 5, rows(2))
    until(b, lambda: (b.poll(0), b.num_stale or None)[1])
    assert b.num_stale == 1
    assert b.poll(0) is None
    b.epoch = 4
    assert until(b, lambda: b.poll(0)).header.layer == 5


def test_no_wake_up_is_missed(make_pair: MakePair) -> None:
    a, b = make_pair()
    turns = 1000
    failures: list[str] = []

    def block_until(transport: Any, probe: Callable[[], Any]) -> Any:
        while (value := probe()) is None:
            before = time.monotonic()
            transport.block(5.0)
            if time.monotonic() - before > 4.0:
                failures.append("slept through a bell")
        return value

    def server() -> None:
        for _ in range(turns):
            b.reply(block_until(b, lambda: b.poll(0)))

    thread = threading.Thread(target=server)
    thread.start()
    sent = rows(1)
    for _ in range(turns):
        sequence = post(a, 1, 0, sent)
        block_until(a, lambda s=sequence: a.poll_reply(1, s))
        a.release(1, sequence)
    thread.join(10)
    assert not failures


def test_block_sees_wake_fds(make_pair: MakePair) -> None:
    a, _ = make_pair()
    fd = os.eventfd(0)
    assert not a.block(0.01, [fd])
    os.eventfd_write(fd, 1)
    assert any(a.block(5.0, [fd]) for _ in range(2))
    os.close(fd)


def test_death_is_reported_once(make_pair: MakePair) -> None:
    a, b = make_pair()
    sequence = post(a, 1, 0, rows(1))
    b.close()

    def block_on() -> None:
        for _ in range(50):
            a.block(0.1)

    with pytest.raises(RankDied, match="seat 0: seat 1"):
        block_on()
    assert not a.block(0.0)
    assert a.peer_state(1) is GONE
    with pytest.raises(RankDied):
        a.poll_reply(1, sequence)
    with pytest.raises(RankDied):
        post(a, 1, 0, rows(1))
    a.close()
    a.close()


def make_router(transport: Any, seat: int, fault_s: float = 5.0) -> TokenRouter:
    placement = ExpertPlacement.contiguous(4, (0, 1))
    kernels = select_kernels("torch")
    g = torch.Generator().manual_seed(1)
    packed = [
        kernels.pack_experts(
            torch.randn(2, 8, HIDDEN, generator=g), torch.randn(2, HIDDEN, 4, generator=g)
        )
        for _ in range(2)
    ]
    return TokenRouter(
        seat=seat,
        placement=placement,
        attention_seats=(0, 1),
        transport=transport,
        experts=GroupedExperts(kernels, placement.physical_on(seat), 4, packed),
        kernels=kernels,
        moe=MoEConfig(num_experts=4, top_k=2, hidden_size=HIDDEN, intermediate_size=4),
        dtype=torch.float32,
        fault_s=fault_s,
    )


def topk(num_tokens: int) -> TopKOutput:
    return TopKOutput(
        torch.tensor([[0, 2]] * num_tokens, dtype=torch.int32), torch.ones(num_tokens, 2)
    )


def test_aborted_step_leaves_nothing_behind(make_pair: MakePair) -> None:
    a, b = make_pair()
    router = make_router(a, 0)
    router.begin_step(1, big=False)
    router.fence(4)
    x = torch.randn(3, HIDDEN)
    with pytest.raises(EpochChanged, match="step 1 of epoch 3"):
        router.forward(0, x, topk(3))
    router.abort_step()
    router.fence(3)
    peer = make_router(b, 1)
    stop = os.eventfd(0)
    thread = threading.Thread(target=lambda: peer.serve_until_wake([stop], 20.0))
    thread.start()
    router.begin_step(1, big=False)
    first = router.forward(0, x, topk(3))
    assert torch.equal(first, router.forward(0, x, topk(3)))
    router.end_step(more_work=False)
    os.eventfd_write(stop, 1)
    thread.join(10)
    assert peer.counters()["served_rounds"] == 3
    os.close(stop)


def test_new_epoch_replaces_the_transport(make_pair: MakePair) -> None:
    a, b = make_pair()
    router = make_router(a, 0)
    router.begin_step(4, big=False)
    b.close()  # the peer dies inside the step
    with pytest.raises(RankDied):
        router.forward(0, torch.randn(2, HIDDEN), topk(2))
    router.abort_step()
    a, b = make_pair(epoch=4)
    router.adopt(a)
    assert (router.epoch, router.step) == (4, 4)
    peer = make_router(b, 1)
    stop = os.eventfd(0)
    thread = threading.Thread(target=lambda: peer.serve_until_wake([stop], 20.0))
    thread.start()
    router.begin_step(4, big=False)
    assert router.forward(0, torch.randn(2, HIDDEN), topk(2)).shape == (2, HIDDEN)
    os.eventfd_write(stop, 1)
    thread.join(10)
    os.close(stop)


def test_peer_without_progress_is_named(make_pair: MakePair) -> None:
    a, _ = make_pair()
    router = make_router(a, 0, fault_s=0.3)
    router.begin_step(5, big=False)
    with pytest.raises(RankDied, match=r"seat 0: seat 1 .*step 5, layer 1, epoch 3"):
        router.forward(1, torch.randn(2, HIDDEN), topk(2))


def test_merged_pass_is_bit_equal_to_lone_passes() -> None:
    ends = socket.socketpair()
    shape = RoundShape(hidden_size=64, top_k=2, dtype=torch.bfloat16, max_rows=64)

    def end(seat: int) -> SharedMemoryTransport:
        return SharedMemoryTransport.create(
            seat=seat,
            epoch=1,
            links={1 - seat: ends[seat]},
            attention_seats=(0, 1),
            expert_seats=(0,),
            shape=shape,
            deadline_s=5.0,
        )

    with ThreadPoolExecutor(2) as threads:
        home, remote = threads.map(end, (0, 1))
    kernels = select_kernels("numba")
    g = torch.Generator().manual_seed(2)
    packed = kernels.pack_experts(
        torch.randn(4, 64, 64, generator=g).bfloat16(),
        torch.randn(4, 64, 32, generator=g).bfloat16(),
    )
    experts = GroupedExperts(kernels, range(4), 4, [packed])
    counters = RouterCounters()
    server = ExpertServer(home, experts, (1,), Waiter(home, counters, 5.0), counters)

    def some(num_tokens: int) -> Rows:
        ids = torch.rand(num_tokens, 4, generator=g).topk(2).indices.to(torch.int32)
        hidden_states = torch.randn(num_tokens, 64, generator=g).bfloat16()
        weights = torch.rand(num_tokens, 2, generator=g)
        out = torch.full((num_tokens, 64), float("nan"))  # a pass sets it
        return Rows(RowBuffer(hidden_states, ids, weights, out), num_tokens)

    def answer(own: Rows | None, theirs: Rows) -> tuple[torch.Tensor | None, torch.Tensor]:
        sequence = post(remote, 0, 0, parts(theirs))
        server.run_pass(0, own, [until(home, lambda: home.poll(1))])
        reply = until(remote, lambda: remote.poll_reply(0, sequence)).clone()
        remote.release(0, sequence)
        return None if own is None else own.out.clone(), reply

    for mine, theirs in ((some(1), some(1)), (some(5), some(3)), (some(20), some(33))):
        merged = answer(mine, theirs)
        server.run_pass(0, mine, [])
        assert torch.equal(merged[0], mine.out)
        assert torch.equal(merged[1], answer(None, theirs)[1])
    assert counters.merged_passes == 3
    home.close()
    remote.close()


def test_moe_layer_on_one_rank_equals_reference() -> None:
    placement = ExpertPlacement.contiguous(4, (0,))
    kernels = select_kernels("torch")
    g = torch.Generator().manual_seed(3)
    w13, w2 = torch.randn(4, 8, HIDDEN, generator=g), torch.randn(4, HIDDEN, 4, generator=g)
    moe = MoEConfig(num_experts=4, top_k=2, hidden_size=HIDDEN, intermediate_size=4)
    router = TokenRouter(
        seat=0,
        placement=placement,
        attention_seats=(0,),
        transport=LocalTransport(0, max_rows=4),
        experts=GroupedExperts(kernels, range(4), 4, [kernels.pack_experts(w13, w2)]),
        kernels=kernels,
        moe=moe,
        dtype=torch.float32,
        fault_s=1.0,
    )
    gate = TopKGate(kernels, kernels.pack_linear(torch.randn(4, HIDDEN, generator=g)), moe)
    layer = MoELayer(gate, router, 0)
    x = torch.randn(9, HIDDEN, generator=g)
    chosen = gate(x)
    torch.testing.assert_close(chosen.topk_weights.sum(-1), torch.ones(9))
    for step, big in enumerate((False, True)):
        router.begin_step(step, big=big)
        (expected,) = all_gather_moe([x], [chosen], (0,), w13, w2, placement)
        torch.testing.assert_close(layer.forward(x), expected)
        router.end_step(more_work=False)
    assert sum(router.gate_tokens()) == sum(router.expert_tokens()) == 2 * 9 * 2


def test_router_of_a_dense_rank() -> None:
    router = TokenRouter(
        seat=0,
        placement=None,
        attention_seats=(0,),
        transport=LocalTransport(0),
        experts=None,
        kernels=select_kernels("torch"),
        moe=None,
        dtype=torch.float32,
        fault_s=1.0,
    )
    router.align()
    router.begin_step(1, big=False)
    router.poll()
    router.end_step(more_work=False)
    fd = os.eventfd(0)
    assert not router.serve_until_wake([fd], 0.01)
    os.eventfd_write(fd, 1)
    assert router.serve_until_wake([fd], 5.0)
    assert router.counters()["decode_steps"] == 1
    assert router.gate_tokens() == router.expert_tokens() == []
    router.close()
    os.close(fd)
