"""The engine's socket to a rank against a listener that cuts its bytes as it likes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import HandshakeError, PlacementError, ProtocolError
from coterie.runtime.cluster.rank_connection import RankConnection
from coterie.runtime.messages import Heartbeat, Joined, Message, SeatAddress
from coterie.runtime.rpc import codec, handshake

TOKEN = b"t" * 32
VERSIONS = {"coterie": "1"}
BEATS = [
    Heartbeat(seat=3, epoch=1, step=step, layer=0, tick=step, state="idle") for step in range(3)
]
FIRST, REST = codec.encode(BEATS[0]), b"".join(codec.encode(beat) for beat in BEATS[1:])
MALFORMED = codec.HEADER.pack(2) + b"\xc1\xc1"
OPENED = b""
"""In a script of the listener: wait until the caller says that it is ready."""
After = Callable[[bytes], list[bytes]]


async def _listen(
    path: Path, after: After, token: bytes = TOKEN, versions: dict[str, str] = VERSIONS
) -> asyncio.Server:
    """A rank of seat 3 that writes ``after(welcome frame)`` piece by piece, then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = handshake.Hello(3, handshake.nonce(), versions)
        writer.write(codec.encode(hello))
        size = codec.body_length(await reader.readexactly(codec.HEADER.size))
        attach = codec.decode(codec.decoder(handshake.Attach), await reader.readexactly(size))
        try:
            reply: Message = handshake.check_attach(hello, attach, token)
        except HandshakeError as error:
            reply = handshake.Refused(str(error))
        for piece in after(codec.encode(reply)):
            if piece == OPENED:
                await reader.readexactly(codec.HEADER.size)
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    return await asyncio.start_unix_server(serve, path)


async def _open(path: Path, got: list[Any], lost: asyncio.Event) -> RankConnection:
    return await RankConnection.open(
        SeatAddress(3, ["attention"], f"unix:{path}", "here", 1),
        token=TOKEN,
        purpose="engine",
        generation=1,
        versions=VERSIONS,
        on_message=got.append,
        on_lost=lambda seat, reason: lost.set(),
        deadline_s=5.0,
    )


@pytest.mark.parametrize(
    "after",
    [
        lambda welcome: [welcome, OPENED, FIRST + REST],
        lambda welcome: [welcome + FIRST, OPENED, REST],
        lambda welcome: [welcome + FIRST + REST[:1], OPENED, REST[1:]],
        lambda welcome: [bytes([byte]) for byte in welcome] + [OPENED, FIRST[:3], FIRST[3:] + REST],
    ],
    ids=["frames-later", "first-with-the-welcome", "cut-in-a-header", "byte-by-byte"],
)
async def test_every_frame_arrives_however_it_is_cut(tmp_path: Path, after: After) -> None:
    got: list[Any] = []
    lost = asyncio.Event()
    async with await _listen(tmp_path / "s", after):
        connection = await _open(tmp_path / "s", got, lost)
        connection.send(Joined(3, 1))
        await asyncio.wait_for(lost.wait(), 5.0)
        connection.send(Joined(3, 1))  # a lost connection drops what is sent
    assert got == BEATS


async def test_a_malformed_frame_ends_the_connection(tmp_path: Path) -> None:
    lost = asyncio.Event()
    got: list[Any] = []
    later: After = lambda welcome: [welcome, OPENED, FIRST + MALFORMED + REST]  # noqa: E731
    async with await _listen(tmp_path / "a", later):
        connection = await _open(tmp_path / "a", got, lost)
        connection.send(Joined(3, 1))
        await asyncio.wait_for(lost.wait(), 5.0)
    assert got == BEATS[:1]
    async with await _listen(tmp_path / "b", lambda welcome: [welcome + MALFORMED]):
        with pytest.raises(ProtocolError):
            await _open(tmp_path / "b", [], asyncio.Event())


async def test_wrong_token_and_wrong_version_are_refused(tmp_path: Path) -> None:
    lost = asyncio.Event()
    async with await _listen(tmp_path / "a", lambda reply: [reply], token=b"x" * 32):
        with pytest.raises(HandshakeError, match="wrong token"):
            await _open(tmp_path / "a", [], lost)
    async with await _listen(tmp_path / "b", lambda reply: [reply], versions={"coterie": "2"}):
        with pytest.raises(HandshakeError, match="differ in coterie: '2' against '1'"):
            await _open(tmp_path / "b", [], lost)
    with pytest.raises(PlacementError, match="cannot reach rank 3"):
        await _open(tmp_path / "nobody", [], lost)
    assert not lost.is_set()
