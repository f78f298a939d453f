"""Real rank processes driven over their real sockets: join, load, serve, abort, orphan, stop."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coterie.errors import HandshakeError
from coterie.experts.placement import ExpertPlacement
from coterie.runtime import config as cfg
from coterie.runtime import messages as wire
from coterie.runtime.cluster.rank_connection import RankMessage
from coterie.runtime.rank.peers import read_body, versions
from coterie.runtime.request import SamplingParams
from coterie.runtime.rpc import codec, handshake
from coterie.runtime.spec import RankSpec

DEADLINE_S = 60.0
NUM_BLOCKS = 64
TOKEN = b"t" * 32
_HANDSHAKE = codec.decoder(handshake.HANDSHAKE)
_MESSAGE = codec.decoder(RankMessage)


class Connection:
    """The engine's end, blocking."""

    def __init__(
        self,
        spec: RankSpec,
        address: wire.SeatAddress,
        *,
        purpose: str = "engine",
        generation: int = 1,
        token: bytes = TOKEN,
    ) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(address.address.removeprefix("unix:"))
        hello = codec.decode(_HANDSHAKE, read_body(self.sock))
        assert isinstance(hello, handshake.Hello)
        proof = {"token": token, "versions": versions(spec)}
        attach = handshake.attach(hello, purpose=purpose, seat=-1, epoch=generation, **proof)
        self.send(attach)
        reply = codec.decode(_HANDSHAKE, read_body(self.sock))
        handshake.check_welcome(hello, attach, reply, token)

    def send(self, message: wire.Message) -> None:
        self.sock.sendall(codec.encode(message))

    def receive(self) -> Any:
        return codec.decode(_MESSAGE, read_body(self.sock))

    def receive_until(self, done: Callable[[Any], bool]) -> Any:
        """The first message that satisfies ``done``; a Failed that does not is an error."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            message = self.receive()
            if done(message):
                return message
            assert not isinstance(message, wire.Failed), message
        raise AssertionError("too late")

    def receive_kind(self, kind: type) -> Any:
        return self.receive_until(lambda message: isinstance(message, kind))

    def close(self) -> None:
        self.sock.close()


def start_process(spec: RankSpec) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie.runtime.rank.main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec))
    process.stdin.close()
    return process


def read_address(process: subprocess.Popen[bytes]) -> wire.SeatAddress:
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=wire.SeatAddress)


class Deployment:
    """Rank processes of one layout, their launcher and their engine."""

    def __init__(self, model_dir: Path, runtime_dir: Path, roles: list[str], **config: Any) -> None:
        attention = tuple(i for i, role in enumerate(roles) if "a" in role)
        experts = tuple(i for i, role in enumerate(roles) if "e" in role)
        runtime_dir.mkdir(mode=0o700)
        self.runtime_dir = runtime_dir
        self.specs = [
            RankSpec(
                deployment="test",
                seat=seat,
                roles=("attention",) * ("a" in role) + ("experts",) * ("e" in role),
                attention_seats=attention,
                expert_seats=experts,
                placement=ExpertPlacement.contiguous(4, experts) if experts else None,
                config=cfg.EngineConfig(
                    model=cfg.ModelArgs(model=str(model_dir)),
                    cache=cfg.CacheConfig(num_kv_blocks=NUM_BLOCKS, block_size=8),
                    scheduler=cfg.SchedulerConfig(max_num_batched_tokens=32),
                    **config,
                ),
                model_dir=str(model_dir),
                max_model_len=256,
                eos_token_ids=(257,),
                runtime_dir=str(runtime_dir),
                token=TOKEN,
            )
            for seat, role in enumerate(roles)
        ]
        self.processes: list[Any] = [start_process(spec) for spec in self.specs]
        self.addresses: list[wire.SeatAddress] = []
        self.links: list[Connection] = []

    def connect(self) -> None:
        self.addresses = [read_address(process) for process in self.processes]
        self.attach()

    def respawn(self, seat: int) -> None:
        """A new process for a seat whose process died."""
        assert wait_exit(self.processes[seat]) != 0
        self.processes[seat].stdout.close()
        self.processes[seat] = start_process(self.specs[seat])
        self.addresses[seat] = read_address(self.processes[seat])
        self.links[seat].close()
        self.links[seat] = Connection(self.specs[seat], self.addresses[seat])

    def attach(self, generation: int = 1) -> None:
        pairs = zip(self.specs, self.addresses, strict=True)
        self.links = [Connection(spec, at, generation=generation) for spec, at in pairs]

    def ask(self, message: wire.Message, kind: type) -> list[Any]:
        for link in self.links:
            link.send(message)
        return [link.receive_kind(kind) for link in self.links]

    def serve(self, epoch: int = 1) -> None:
        self.ask(wire.Join(epoch, self.addresses, DEADLINE_S), wire.Joined)
        if epoch == 1:
            loaded = self.ask(wire.Load(DEADLINE_S), wire.Loaded)
            for spec, answer in zip(self.specs, loaded, strict=True):
                assert answer.num_blocks == (NUM_BLOCKS if "attention" in spec.roles else 0)
        for link in self.links:
            link.send(wire.Serve(epoch))

    def generate(self, seat: int, assigns: list[wire.Assign]) -> dict[str, list[int]]:
        """Run requests to their end; checks that every token comes once and in order."""
        link = self.links[seat]
        for assign in assigns:
            link.send(assign)
        tokens: dict[str, list[int]] = {assign.request_id: [] for assign in assigns}
        open_ids = set(tokens)
        while open_ids:
            step = link.receive_kind(wire.StepOutput)
            for output in step.outputs:
                assert output.request_id in open_ids
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    open_ids.remove(output.request_id)
        assert step.kv_blocks_free == NUM_BLOCKS
        link.send(wire.Acknowledge(list(tokens)))
        return tokens

    def close(self) -> None:
        for link in self.links:
            link.close()
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)
            process.stdout.close()


def assign(request_id: str, prompt: list[int], num: int = 12, **params: Any) -> wire.Assign:
    settings = {"temperature": 0.0, "max_tokens": num, "seed": 1, "ignore_eos": True, **params}
    return wire.Assign(request_id, prompt, [], SamplingParams(**settings), eos_token_ids=[257])


def wait_exit(process: subprocess.Popen[bytes]) -> int:
    return process.wait(DEADLINE_S)


def reference(model: Any, prompt: list[int], num: int) -> list[int]:
    """Greedy continuation by transformers."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [[5, 6, 7], list(range(20, 60)), [200], list(range(100, 117))]


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Any, tmp_path_factory: Any) -> Iterator[Deployment]:
    """Two colocated ranks of a tiny Mixtral, serving."""
    folder = tmp_path_factory.mktemp("rt") / "d"
    deployment = Deployment(tiny_model_dir("mixtral"), folder, ["ae", "ae"])
    try:
        deployment.connect()
        deployment.serve()
        yield deployment
    finally:
        deployment.close()


def test_both_ranks_give_the_tokens_of_transformers(
    pair: Deployment, tiny_model_dir: Any, hf_model: Any
) -> None:
    model = hf_model(tiny_model_dir("mixtral"))
    wanted = [reference(model, prompt, 12) for prompt in PROMPTS]
    for seat in (0, 1):
        assigns = [assign(f"{seat}-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        tokens = pair.generate(seat, assigns)
        assert [tokens[a.request_id] for a in assigns] == wanted
    again = pair.generate(0, [assign("again", PROMPTS[1])])
    assert again["again"] == wanted[1]


def test_seeded_sampling_does_not_depend_on_company(pair: Deployment) -> None:
    one = assign("alone", PROMPTS[0], temperature=1.0, seed=7, top_p=0.9)
    alone = pair.generate(0, [one])["alone"]
    others = [assign(f"o{i}", p, temperature=1.0, seed=i) for i, p in enumerate(PROMPTS)]
    crowd = pair.generate(1, [*others, msgspec.structs.replace(one, request_id="in crowd")])
    assert crowd["in crowd"] == alone


def test_abort_gives_blocks_back(pair: Deployment) -> None:
    link = pair.links[0]
    link.send(assign("long", [1, 2, 3], 200))
    link.receive_until(lambda m: isinstance(m, wire.StepOutput) and m.kv_blocks_free < NUM_BLOCKS)
    link.send(wire.Abort(["long", "unknown"]))
    link.receive_until(lambda m: isinstance(m, wire.StepOutput) and m.kv_blocks_free == NUM_BLOCKS)
    link.send(wire.QueryStatus())
    status = link.receive_kind(wire.RankStatus)
    assert status.kv_blocks_free == status.kv_blocks_total == NUM_BLOCKS


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "no tokens"), ([1] * 300, "max_model_len"), ([9999], "between")]
)
def test_bad_request_fails_alone(pair: Deployment, prompt: list[int], words: str) -> None:
    link = pair.links[1]
    link.send(assign("bad", prompt))
    failed = link.receive_until(lambda m: isinstance(m, wire.Failed))
    assert (failed.kind, failed.request_ids) == ("InvalidRequest", ["bad"])
    assert words in failed.detail
    assert len(pair.generate(1, [assign("good", [1, 2])])["good"]) == 12


def test_status(pair: Deployment) -> None:
    pair.generate(0, [assign("s", [1, 2, 3], 4)])
    first, second = pair.ask(wire.QueryStatus(), wire.RankStatus)
    assert (first.seat, second.seat) == (0, 1)
    assert first.pid == pair.processes[0].pid
    assert first.state in ("idle", "stepping")
    assert first.last_commit_age_s < DEADLINE_S
    assert first.expert_layers == 2
    assert first.physical_ids + second.physical_ids == [0, 1, 2, 3]
    assert sum(first.expert_tokens + second.expert_tokens) == sum(
        first.gate_tokens + second.gate_tokens
    )
    assert first.counters["scheduler_decode_tokens"] > 0


def test_heartbeat_moves_while_idle(pair: Deployment) -> None:
    beats = Connection(pair.specs[0], pair.addresses[0], purpose="heartbeat")
    first = beats.receive()
    assert isinstance(first, wire.Heartbeat)
    later = beats.receive_until(lambda beat: beat.tick > first.tick)
    assert later.state == "idle"
    beats.close()


def test_wrong_token_and_stale_engine_are_refused(pair: Deployment) -> None:
    with pytest.raises(HandshakeError, match="wrong token"):
        Connection(pair.specs[0], pair.addresses[0], token=b"x" * 32)
    with pytest.raises(HandshakeError, match="generation"):
        Connection(pair.specs[0], pair.addresses[0], generation=0)


def test_new_engine_takes_over_without_reload(pair: Deployment) -> None:
    old = pair.links
    pair.attach(generation=2)
    for link in old:
        with contextlib.suppress(ConnectionError):
            assert link.sock.recv(1) == b""
        link.close()
    assert len(pair.generate(0, [assign("new engine", [4, 5])])["new engine"]) == 12


def test_new_epoch_keeps_weights_and_cache(pair: Deployment) -> None:
    before = pair.generate(0, [assign("before", PROMPTS[3])])["before"]
    pair.serve(epoch=2)
    assert pair.generate(0, [assign("after", PROMPTS[3])])["after"] == before
    assert pair.generate(1, [assign("other", PROMPTS[3])])["other"] == before
    pair.links[0].send(wire.Serve(1))
    failed = pair.links[0].receive_until(lambda m: isinstance(m, wire.Failed))
    assert failed.kind == "EpochChanged"
    pair.links[0].send(wire.Serve(2))


def test_stop_ends_processes_and_removes_sockets(pair: Deployment) -> None:
    for link in pair.links:
        link.send(wire.Stop(5.0))
    assert [wait_exit(process) for process in pair.processes] == [0, 0]
    assert not list(pair.runtime_dir.glob("*.sock"))


@pytest.fixture(scope="module")
def split(tiny_model_dir: Any, tmp_path_factory: Any) -> Iterator[Deployment]:
    """One attention rank, one expert rank, a short orphan grace."""
    folder = tmp_path_factory.mktemp("rt") / "d"
    timeouts = cfg.TimeoutConfig(orphan_grace_s=0.5)
    deployment = Deployment(tiny_model_dir("mixtral"), folder, ["a", "e"], timeouts=timeouts)
    try:
        deployment.connect()
        deployment.serve()
        yield deployment
    finally:
        deployment.close()


def test_expert_only_rank(split: Deployment, tiny_model_dir: Any, hf_model: Any) -> None:
    tokens = split.generate(0, [assign("x", PROMPTS[1])])["x"]
    assert tokens == reference(hf_model(tiny_model_dir("mixtral")), PROMPTS[1], 12)
    link = split.links[1]
    link.send(assign("y", [1]))
    failed = link.receive_until(lambda m: isinstance(m, wire.Failed))
    assert failed.request_ids == ["y"]
    link.send(wire.QueryStatus())
    assert link.receive_kind(wire.RankStatus).last_commit_age_s is None


def test_step_survives_the_death_of_a_peer(split: Deployment) -> None:
    """The step is dropped, the request stays bound, and goes on where it was in a new epoch."""
    wanted = split.generate(0, [assign("whole", [1, 2, 3], 200)])["whole"]
    link = split.links[0]
    link.send(assign("x", [1, 2, 3], 200))
    tokens = list(link.receive_kind(wire.StepOutput).outputs[0].token_ids)
    split.processes[1].send_signal(signal.SIGKILL)
    while not isinstance(message := link.receive(), wire.Failed):
        tokens += message.outputs[0].token_ids
    assert (message.kind, message.request_ids) == ("RankDied", [])
    assert "seat 1" in message.detail
    link.send(wire.QueryStatus())
    status = link.receive_kind(wire.RankStatus)
    assert status.state == "failed"
    assert status.kv_blocks_free < NUM_BLOCKS
    split.respawn(1)
    split.ask(wire.Join(2, split.addresses, DEADLINE_S), wire.Joined)
    split.links[1].send(wire.Load(DEADLINE_S))
    split.links[1].receive_kind(wire.Loaded)
    for each in split.links:
        each.send(wire.Serve(2))
    while len(tokens) < 200:
        tokens += link.receive_kind(wire.StepOutput).outputs[0].token_ids
    assert tokens == wanted


def test_orphans_end_after_the_grace_and_clean_up(split: Deployment) -> None:
    assert [process.poll() for process in split.processes] == [None, None]
    for link in split.links:
        link.close()
    assert [wait_exit(process) for process in split.processes] == [0, 0]
    assert not split.runtime_dir.exists()


def test_dense_rank_and_sigterm(tiny_model_dir: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("rt") / "d"
    deployment = Deployment(tiny_model_dir("llama"), folder, ["a"])
    try:
        deployment.connect()
        deployment.serve()
        assert len(deployment.generate(0, [assign("x", [1])])["x"]) == 12
        deployment.processes[0].send_signal(signal.SIGTERM)
        assert wait_exit(deployment.processes[0]) == 0
        assert select.select([deployment.links[0].sock], [], [], DEADLINE_S)[0]
    finally:
        deployment.close()
