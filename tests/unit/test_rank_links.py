"""A rank's connections: frames to and from the engine, the listener's rules, peer links."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coterie.errors import ConfigError, HandshakeError, RankDied
from coterie.runtime.config import EngineConfig
from coterie.runtime.messages import Abort, QueryStatus, SeatAddress, StepOutput, TokenOutput
from coterie.runtime.rank.engine_link import MAX_BACKLOG_BYTES, EngineLink
from coterie.runtime.rank.heartbeat import HeartbeatThread, Vitals
from coterie.runtime.rank.peers import (
    Listener,
    anyone_listens,
    connect_peers,
    dial,
    read_body,
)
from coterie.runtime.rpc import codec
from coterie.runtime.spec import RankSpec

DEADLINE_S = 20.0


def make_spec(runtime_dir: Path, seat: int, **changes: object) -> RankSpec:
    spec = RankSpec(
        deployment="d",
        seat=seat,
        roles=("attention",),
        attention_seats=(0, 1, 2),
        expert_seats=(),
        placement=None,
        config=EngineConfig(),
        model_dir="m",
        max_model_len=16,
        eos_token_ids=(),
        runtime_dir=str(runtime_dir),
        token=b"secret",
    )
    return msgspec.structs.replace(spec, **changes)


def address(spec: RankSpec) -> SeatAddress:
    path = f"unix:{spec.runtime_dir}/seat-{spec.seat}.sock"
    return SeatAddress(spec.seat, list(spec.roles), path, "host", 1)


@pytest.fixture
def link_pair() -> Iterator[tuple[EngineLink, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = EngineLink(ours, 1)
    yield link, theirs
    link.close()
    theirs.close()


def make_output(size: int) -> StepOutput:
    tokens = TokenOutput("r", list(range(size)))
    return StepOutput(0, 1, 1, [tokens], 1, 0, 5, 0.1)


def test_frames_arrive_whole_however_they_are_cut(
    link_pair: tuple[EngineLink, socket.socket],
) -> None:
    link, engine = link_pair
    data = codec.encode(Abort(["a"])) + codec.encode(QueryStatus()) + codec.encode(Abort(["b"]))
    received = []
    for index in range(0, len(data), 3):
        engine.sendall(data[index : index + 3])
        received += link.receive()
    assert received == [Abort(["a"]), QueryStatus(), Abort(["b"])]
    assert link.receive() == []


def test_messages_before_the_end_are_delivered(
    link_pair: tuple[EngineLink, socket.socket],
) -> None:
    link, engine = link_pair
    engine.sendall(codec.encode(Abort(["a"])) + b"\x05")
    engine.close()
    assert link.receive() == [Abort(["a"])]
    assert link.receive() == []
    assert link.closed
    link.send(make_output(1))


@pytest.mark.parametrize("data", [b"\x03\x00\x00\x00abc", b"\xff\xff\xff\xff"])
def test_malformed_frames_close_the_link(
    link_pair: tuple[EngineLink, socket.socket], data: bytes
) -> None:
    link, engine = link_pair
    engine.sendall(data)
    assert link.receive() == []
    assert link.closed


def test_a_slow_engine_never_blocks_the_rank(
    link_pair: tuple[EngineLink, socket.socket],
) -> None:
    link, engine = link_pair
    messages = [make_output(20_000) for _ in range(20)]
    for message in messages:
        link.send(message)
    assert link.has_backlog
    decoder = codec.decoder(StepOutput)
    engine.setblocking(True)
    reader: list[StepOutput] = []

    def read() -> None:
        reader.extend(codec.decode(decoder, read_body(engine)) for _ in messages)

    thread = threading.Thread(target=read)
    thread.start()
    end = time.monotonic() + DEADLINE_S
    while link.has_backlog and time.monotonic() < end:
        link.drain(0.1)
    thread.join(DEADLINE_S)
    assert reader == messages


def test_an_engine_that_never_reads_counts_as_gone(
    link_pair: tuple[EngineLink, socket.socket],
) -> None:
    link, _ = link_pair
    message = make_output(1_000_000)
    for _ in range(MAX_BACKLOG_BYTES // 1_000_000 + 2):
        link.send(message)
    assert link.closed


def test_three_ranks_link_up_in_any_order(tmp_path: Path) -> None:
    specs = [make_spec(tmp_path, seat) for seat in range(3)]
    listeners = [Listener(spec) for spec in specs]
    members = [address(spec) for spec in specs]
    links: dict[int, dict[int, socket.socket]] = {}

    def join(seat: int) -> None:
        links[seat] = connect_peers(
            specs[seat], listeners[seat], 3, members, DEADLINE_S, lambda: False
        )

    for listener in listeners:
        listener.start()
    threads = [threading.Thread(target=join, args=(seat,)) for seat in (0, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert {seat: set(peers) for seat, peers in links.items()} == {
        0: {1, 2},
        1: {0, 2},
        2: {0, 1},
    }
    for a, b in ((0, 1), (0, 2), (1, 2)):
        links[a][b].sendall(b"x")
        assert links[b][a].recv(1) == b"x"
    for peers in links.values():
        for sock in peers.values():
            sock.close()
    for listener in listeners:
        listener.close()
        listener.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(make_spec(tmp_path, 1, model_hash="m1"))
    listener.start()
    yield listener
    listener.close()


def dial_from(tmp_path: Path, epoch: int, **changes: object) -> socket.socket:
    spec = make_spec(tmp_path, 0, **{"model_hash": "m1", **changes})
    deadline = time.monotonic() + DEADLINE_S
    return dial(spec, address(make_spec(tmp_path, 1)), epoch, deadline)


def test_old_epochs_are_refused_and_new_ones_kept(listener: Listener, tmp_path: Path) -> None:
    newer: list[int] = []
    listener.on_newer_epoch = newer.append
    listener.adopt_epoch(2)
    with pytest.raises(HandshakeError, match="seat 1 is in epoch 2 and refuses seat 0 of epoch 1"):
        dial_from(tmp_path, 1)
    with dial_from(tmp_path, 3), contextlib.ExitStack() as stack:
        peers = listener.wait_peers(3, [0], time.monotonic() + DEADLINE_S, lambda: False)
        stack.enter_context(peers[0])
    assert newer == [3]


def test_mismatch_names_seats_and_field(listener: Listener, tmp_path: Path) -> None:
    with pytest.raises(HandshakeError, match="seat 1 and seat 0 differ in model: 'm1'"):
        dial_from(tmp_path, 1, model_hash="m2")
    with pytest.raises(HandshakeError, match="wrong token"):
        dial_from(tmp_path, 1, token=b"other")


def test_missing_peers_are_named(listener: Listener, tmp_path: Path) -> None:
    with pytest.raises(RankDied, match=r"seat 1: no link from seats \[0\] for epoch 4"):
        listener.wait_peers(4, [0], time.monotonic(), lambda: False)
    with pytest.raises(RankDied, match="no link"):
        listener.wait_peers(4, [0], time.monotonic() + DEADLINE_S, lambda: True)
    nobody = address(make_spec(tmp_path, 2))
    with pytest.raises(RankDied, match="seat 0 to seat 2, epoch 1"):
        dial(make_spec(tmp_path, 0), nobody, 1, time.monotonic() + DEADLINE_S)


def test_garbage_does_not_disturb_the_listener(listener: Listener, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(listener.path)
        sock.sendall(b"\xff" * 100)
        sock.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
    dial_from(tmp_path, 1).close()


def test_dead_sockets_do_not_listen(tmp_path: Path) -> None:
    assert not anyone_listens(str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "seat-0.sock"))
        sock.listen(1)
        assert anyone_listens(str(tmp_path))
    assert not anyone_listens(str(tmp_path))


def test_long_paths_are_refused(tmp_path: Path) -> None:
    listener = Listener(make_spec(tmp_path / ("x" * 100), 0))
    with pytest.raises(ConfigError, match="too long"):
        listener.start()
    listener.close()


def test_heartbeat_survives_a_lost_connection() -> None:
    vitals = Vitals(seat=3, state="idle")
    thread = HeartbeatThread(vitals)
    decoder = codec.decoder(type(vitals.beat()))
    first, lost = socket.socketpair()
    lost.close()
    thread.attach(first)
    thread.start()
    ours, theirs = socket.socketpair()
    theirs.settimeout(DEADLINE_S)
    thread.attach(ours)
    assert codec.decode(decoder, read_body(theirs)) == vitals.beat()
    thread.close()
    theirs.close()
