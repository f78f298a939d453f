"""The router between real processes, over shared memory and gloo, against the reference.

One pool of forked workers serves the whole file; a job is a function of this file that every
worker runs with its own seat and fresh links to the others.
"""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import RankDied
from coterie.experts.config import MoEConfig
from coterie.experts.grouped import GroupedExperts
from coterie.experts.kernels.torch_kernels import TorchKernels
from coterie.experts.placement import ExpertPlacement
from coterie.router.gate import TopKOutput
from coterie.router.reference import all_gather_moe
from coterie.router.token_router import TokenRouter
from coterie.router.transports.base import RoundShape
from coterie.router.transports.distributed import DistributedTransport
from coterie.router.transports.shared_memory import SharedMemoryTransport

HIDDEN, WIDTH, LAYERS = 16, 8, 3
WORKERS = 3
TRANSPORTS = ["shared_memory", "gloo"]


class SlowKernels(TorchKernels):
    """Passes that take a real model's time, without using the core for it."""

    def experts(self, *args: Any) -> None:
        time.sleep(0.002)
        super().experts(*args)


class Pool:
    """Forked workers; ``run`` hands each a seat, links to all others and the same job."""

    def __init__(self, size: int) -> None:
        context = get_context("fork")
        self.pids, self._pipes, self._sockets = [], [], []
        for _ in range(size):
            pipe, child_pipe = context.Pipe()
            ours, theirs = socket.socketpair()
            process = context.Process(target=_worker, args=(child_pipe, theirs), daemon=True)
            process.start()
            self.pids.append(process.pid)
            self._pipes.append(pipe)
            self._sockets.append(ours)

    def run(self, job: Callable[..., Any], seats: int, **kwargs: Any) -> list[Any]:
        self.start(job, seats, **kwargs)
        return [self.result(seat) for seat in range(seats)]

    def start(self, job: Callable[..., Any], seats: int, **kwargs: Any) -> None:
        ends: list[dict[int, socket.socket]] = [{} for _ in range(seats)]
        for i in range(seats):
            for j in range(i + 1, seats):
                ends[i][j], ends[j][i] = socket.socketpair()
        for seat in range(seats):
            links = ends[seat]
            self._pipes[seat].send((job.__name__, seat, list(links), kwargs))
            if links:
                fds = [link.fileno() for link in links.values()]
                socket.send_fds(self._sockets[seat], [b"x"], fds)
        for links in ends:
            for link in links.values():
                link.close()

    def result(self, seat: int, timeout_s: float = 20.0) -> Any:
        assert self._pipes[seat].poll(timeout_s), f"seat {seat} does not answer"
        ok, value = self._pipes[seat].recv()
        assert ok, f"seat {seat}:\n{value}"
        return value

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


def _worker(pipe: Any, fd_socket: socket.socket) -> None:
    torch.set_num_threads(1)
    while True:
        name, seat, peers, kwargs = pipe.recv()
        links = {}
        if peers:
            _, fds, _, _ = socket.recv_fds(fd_socket, 1, len(peers))
            links = {p: socket.socket(fileno=fd) for p, fd in zip(peers, fds, strict=True)}
        try:
            pipe.send((True, globals()[name](seat, links, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(WORKERS)
    yield pool
    pool.close()


@pytest.fixture
def throwaway() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def weights(num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    w13 = torch.randn(LAYERS, num_experts, 2 * WIDTH, HIDDEN, generator=g) * 0.3
    return w13, torch.randn(LAYERS, num_experts, HIDDEN, WIDTH, generator=g) * 0.3


def make_router(
    seat: int,
    links: dict[int, socket.socket],
    *,
    transport: str = "shared_memory",
    attention: tuple[int, ...] = (0, 1),
    experts: tuple[int, ...] = (0, 1),
    num_experts: int = 4,
    top_k: int = 2,
    max_rows: int = 64,
    fault_s: float = 10.0,
    store_dir: str = "",
    kernels: type[TorchKernels] = TorchKernels,
) -> TokenRouter:
    placement = ExpertPlacement.contiguous(num_experts, experts)
    shape = RoundShape(hidden_size=HIDDEN, top_k=top_k, dtype=torch.float32, max_rows=max_rows)
    common: dict[str, Any] = dict(
        seat=seat, epoch=1, links=links, attention_seats=attention, expert_seats=experts
    )
    common.update(shape=shape, deadline_s=10.0)
    link: SharedMemoryTransport | DistributedTransport
    if transport == "gloo":
        link = DistributedTransport.create(**common, store_dir=store_dir)
    else:
        link = SharedMemoryTransport.create(**common)
    grouped = None
    if seat in experts:
        backend, local = kernels(), list(placement.physical_on(seat))
        w13, w2 = weights(num_experts)
        packed = [backend.pack_experts(w13[l, local], w2[l, local]) for l in range(LAYERS)]
        grouped = GroupedExperts(backend, local, num_experts, packed)
    moe = MoEConfig(
        num_experts=num_experts, top_k=top_k, hidden_size=HIDDEN, intermediate_size=WIDTH
    )
    return TokenRouter(
        seat=seat,
        placement=placement,
        attention_seats=attention,
        transport=link,
        experts=grouped,
        kernels=kernels(),
        moe=moe,
        dtype=torch.float32,
        fault_s=fault_s,
    )


def batch(
    seed: int, num_tokens: int, num_experts: int, top_k: int, case: str = "random"
) -> tuple[torch.Tensor, TopKOutput]:
    g = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(num_tokens, HIDDEN, generator=g)
    scores = torch.rand(num_tokens, num_experts, generator=g)
    if case == "one expert":
        scores[:, num_experts - 1] = 2.0
    top = scores.topk(top_k)
    ids = top.indices.to(torch.int32)
    if case == "missing":
        ids[torch.rand(ids.shape, generator=g) < 0.5] = -1
    if case == "none":
        ids[:] = -1
    return hidden_states, TopKOutput(ids, top.values)


CASES = [
    ("random", 7),
    ("random", 0),
    ("one expert", 5),
    ("missing", 6),
    ("none", 3),
    ("random", 1),
]


def steps_job(
    seat: int, links: dict[int, socket.socket], *, num_attention: int, cases: list, **kwargs: Any
) -> list[list[torch.Tensor]]:
    router = make_router(seat, links, **kwargs)
    outputs: list[list[torch.Tensor]] = []
    if seat < num_attention:
        for index, (case, num_tokens) in enumerate(cases):
            router.align()
            router.begin_step(index, big=case == "random" and num_tokens > 20)
            outputs.append([])
            for layer in range(LAYERS):
                router.enter_layer(layer)
                seed = 1000 * index + 10 * layer + seat
                x, topk = batch(seed, num_tokens, kwargs["num_experts"], kwargs["top_k"], case)
                outputs[-1].append(router.forward(layer, x, topk))
                router.poll()
            router.end_step(more_work=index + 1 < len(cases))
    serve_until_peers_close(router)
    return outputs


def serve_until_peers_close(router: TokenRouter) -> None:
    """Serve on until nobody has asked for anything for a while, or somebody left."""
    try:
        before = -1
        while before != (before := router.counters()["served_rounds"]):
            router.serve_until_wake([], 0.5)
    except RankDied:
        pass
    router.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("attention", "experts", "num_experts", "top_k", "max_rows"),
    [
        ((0, 1), (0, 1), 3, 2, 64),
        ((0,), (1, 2), 5, 3, 2),
        ((0, 1), (2,), 4, 1, 64),
        ((0, 1, 2), (0, 1, 2), 4, 4, 4),
    ],
)
def test_equals_reference(
    pool: Pool,
    tmp_path: Path,
    transport: str,
    attention: tuple[int, ...],
    experts: tuple[int, ...],
    num_experts: int,
    top_k: int,
    max_rows: int,
) -> None:
    seats = len({*attention, *experts})
    cases = [*CASES, ("random", 30)]  # the last as a big step
    results = pool.run(
        steps_job,
        seats,
        num_attention=len(attention),
        cases=cases,
        transport=transport,
        attention=attention,
        experts=experts,
        num_experts=num_experts,
        top_k=top_k,
        max_rows=max_rows,
        store_dir=str(tmp_path),
    )
    placement = ExpertPlacement.contiguous(num_experts, experts)
    w13, w2 = weights(num_experts)
    for index, (case, num_tokens) in enumerate(cases):
        for layer in range(LAYERS):
            rows = [
                batch(1000 * index + 10 * layer + seat, num_tokens, num_experts, top_k, case)
                for seat in attention
            ]
            xs, topks = zip(*rows, strict=True)
            expected = all_gather_moe(xs, topks, attention, w13[layer], w2[layer], placement)
            for seat in attention:
                torch.testing.assert_close(
                    results[seat][index][layer], expected[seat], atol=1e-5, rtol=1e-5
                )


def drift_job(seat: int, links: dict[int, socket.socket], *, delay_s: float) -> dict[str, float]:
    router = make_router(seat, links, kernels=SlowKernels)
    if seat == 1:
        router.serve_until_wake([], delay_s)
    warm: dict[str, float] = {}
    for index in range(24):
        if index == 8:
            warm = router.counters()
        router.align()
        router.begin_step(index, big=False)
        for layer in range(LAYERS):
            router.enter_layer(layer)
            time.sleep(0.001)  # attention
            router.forward(layer, *batch(index + layer, 8, 4, 2))
        router.end_step(more_work=index < 23)
    counters = router.counters()
    serve_until_peers_close(router)
    return {name: counters[name] - warm[name] for name in counters}


def test_unaligned_starts_heal(pool: Pool) -> None:
    for result in pool.run(drift_job, 2, delay_s=0.009):
        passes = result["expert_passes"] / (result["decode_steps"] * LAYERS)
        assert passes < 1.25, result


def idle_job(seat: int, links: dict[int, socket.socket]) -> tuple[float, dict[str, float]]:
    router = make_router(seat, links, attention=(0, 1), experts=(2,), kernels=SlowKernels)
    cpu = 0.0
    if seat == 0:
        for index in range(60):
            router.begin_step(index, big=False)
            for layer in range(LAYERS):
                router.forward(layer, *batch(index + layer, 4, 4, 2))
            router.end_step(more_work=True)
    elif seat == 1:
        start = time.process_time()
        router.serve_until_wake([], 1.0)
        cpu = time.process_time() - start
    else:
        while router.counters()["served_rounds"] != 60 * LAYERS:
            router.serve_until_wake([], 0.2)
    counters = router.counters()
    serve_until_peers_close(router)
    return cpu, counters


def test_idle_rank_sleeps_and_delays_nobody(pool: Pool) -> None:
    results = pool.run(idle_job, 3)
    assert results[1][0] < 0.03, "CPU seconds of one idle second"
    assert results[2][1]["gather_timeouts"] == 0
    assert results[2][1]["lone_passes"] == 60 * LAYERS


def mixed_job(seat: int, links: dict[int, socket.socket]) -> tuple[list[torch.Tensor], dict]:
    router = make_router(seat, links, kernels=SlowKernels)
    outputs = []
    for index in range(1 if seat == 0 else 8):
        router.begin_step(index, big=seat == 0)
        for layer in range(LAYERS):
            rows = batch(100 * seat + layer, 60 if seat == 0 else 3, 4, 2)
            outputs.append(router.forward(layer, *rows))
            router.poll()
        router.end_step(more_work=True)
    serve_until_peers_close(router)
    return outputs, router.counters()


def test_big_job_beside_small_rounds(pool: Pool) -> None:
    (big, _), (small, counters) = pool.run(mixed_job, 2)
    assert counters["job_pieces"] >= LAYERS
    placement = ExpertPlacement.contiguous(4, (0, 1))
    w13, w2 = weights(4)
    for layer in range(LAYERS):
        rows = [batch(layer, 60, 4, 2), batch(100 + layer, 3, 4, 2)]
        xs, topks = zip(*rows, strict=True)
        expected = all_gather_moe(xs, topks, (0, 1), w13[layer], w2[layer], placement)
        torch.testing.assert_close(big[layer], expected[0])
        for step in range(8):
            torch.testing.assert_close(small[step * LAYERS + layer], expected[1])


def victim_job(seat: int, links: dict[int, socket.socket], *, end: str, **kwargs: Any) -> Any:
    router = make_router(seat, links, fault_s=0.5, **kwargs)
    if seat == 1:
        if end == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    router.begin_step(7, big=False)
    start = time.perf_counter()
    try:
        router.forward(1, *batch(0, 4, 4, 2))
    except RankDied as error:
        router.abort_step()
        return str(error), time.perf_counter() - start
    return "no error", 0.0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("end", ["exit", "stop"])
def test_dead_peer_is_noticed(throwaway: Pool, tmp_path: Path, transport: str, end: str) -> None:
    throwaway.start(victim_job, 2, end=end, transport=transport, store_dir=str(tmp_path))
    message, seconds = throwaway.result(0)
    assert "seat 0: seat 1" in message
    assert "epoch 1" in message
    assert seconds < 3.0
