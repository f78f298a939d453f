"""The msgpack RPC over a scripted engine: SDK clients, statuses, cancel, limits, broken frames."""

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from coterie.errors import (
    CoterieError,
    DeadlineExceeded,
    EngineDead,
    HandshakeError,
    InvalidRequest,
    NotFound,
    QueueFull,
)
from coterie.runtime.api.client import AsyncClient, Client
from coterie.runtime.api.rpc_types import GENERATE, GenerateCall, Nothing
from coterie.runtime.request import RequestOutput, SamplingParams
from coterie.runtime.rpc import codec, protocol
from coterie.runtime.rpc.client import RpcConnection
from coterie.runtime.rpc.server import RpcLimits


@pytest.fixture
async def client(scripted_server: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(port=scripted_server.rpc_port, timeout_s=20) as client:
        yield client


@pytest.fixture
async def connection(scripted_server: Any) -> AsyncIterator[RpcConnection]:
    connection = await RpcConnection.connect("127.0.0.1", scripted_server.rpc_port)
    yield connection
    await connection.close()


async def test_generate(client: AsyncClient) -> None:
    result = await client.generate("hello", max_tokens=7, n=2, logprobs=1)
    assert [output.text for output in result.outputs] == ["hellohe", "ellohel"]
    assert result.text == "hellohe"
    assert result.finish_reason == "length"
    assert result.prompt_token_ids == list(b"hello")
    assert result.outputs[0].logprobs is not None
    assert len(result.outputs[0].logprobs) == 7
    by_ids = await client.generate(
        prompt_token_ids=[97, 98], sampling_params=SamplingParams(max_tokens=3)
    )
    assert by_ids.text == "aba"
    assert len((await client.generate("ab")).token_ids) == 16


async def test_stream_longer_than_the_window(client: AsyncClient) -> None:
    count = 5 * protocol.CHUNK_WINDOW
    outputs = await client.generate("abc", max_tokens=count, stream=True)
    texts = [output.text async for output in outputs]
    assert "".join(texts) == ("abc" * count)[:count]
    assert len(texts) == count


async def test_chat_and_the_rest(client: AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat(messages, max_tokens=7)
    assert answer.text == "user\nhi"
    ids = await client.tokenize(messages=messages)
    assert ids == answer.prompt_token_ids
    assert await client.tokenize("h\u00e9") == list("h\u00e9".encode())
    assert await client.detokenize([104, 105, 257]) == "hi"
    assert await client.detokenize([104, 257], skip_special_tokens=False) == "h</s>"
    assert (await client.models())[0]["id"] == "scripted"
    assert (await client.status())["epoch"] == 1
    assert (await client.health())["ready"] is True


async def test_many_calls_on_one_connection(client: AsyncClient) -> None:
    results = await asyncio.gather(
        *(client.generate(f"{index:03d}", max_tokens=6) for index in range(200))
    )
    assert [result.text for result in results] == [f"{index:03d}" * 2 for index in range(200)]


async def test_errors(client: AsyncClient) -> None:
    with pytest.raises(QueueFull) as full:
        await client.generate("full")
    assert full.value.retry_after_s == 2.4
    with pytest.raises(InvalidRequest, match="temperature") as invalid:
        await client.generate("x", temperature=-1)
    assert invalid.value.param == "temperature"
    assert (full.value.status, invalid.value.status) == ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
    with pytest.raises(InvalidRequest, match="no field 'heat'"):
        await client.generate("x", heat=1)
    with pytest.raises(InvalidRequest):
        await client.chat([{"role": "user", "content": 5}])
    with pytest.raises(InvalidRequest, match="cannot be set"):
        await client.chat(
            [{"role": "user", "content": "x"}], chat_template_kwargs={"tokenize": False}
        )
    with pytest.raises(InvalidRequest):
        await client.detokenize([-1])
    with pytest.raises(EngineDead) as dead:
        await client.generate("dead")
    assert dead.value.status == "UNAVAILABLE"
    with pytest.raises(DeadlineExceeded) as late:
        await client.generate("late")
    assert late.value.status == "DEADLINE_EXCEEDED"


async def test_deadline_ends_the_call(client: AsyncClient, scripted_server: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.generate("hang", timeout_s=0.2)
    scripted_server.engine.wait_idle()


async def test_leaving_a_stream_cancels(client: AsyncClient, scripted_server: Any) -> None:
    engine = scripted_server.engine
    before = len(engine.aborted)
    outputs = await client.generate("hang", stream=True)
    async with aclosing(outputs) as items:
        async for _ in items:
            break
    engine.wait_idle()
    assert len(engine.aborted) == before + 1
    assert (await client.generate("ab", max_tokens=2)).text == "ab"


async def test_abort_by_id(client: AsyncClient, scripted_server: Any) -> None:
    outputs = await client.generate("hang", stream=True, request_id="mine")
    assert (await anext(outputs)).request_id == "mine"
    await client.abort("mine")
    assert "mine" in scripted_server.engine.aborted
    await client.abort("unknown")
    await outputs.aclose()


async def test_a_lost_connection_cancels_its_calls(scripted_server: Any) -> None:
    client = AsyncClient(port=scripted_server.rpc_port)
    outputs = await client.generate("hang", stream=True)
    await anext(outputs)
    await client.close()
    scripted_server.engine.wait_idle()
    with pytest.raises(Exception, match="closed"):
        await anext(outputs)
    assert (await client.generate("ab", max_tokens=2)).text == "ab", "it connects again"
    await client.close()


async def test_a_slow_reader_stops_its_own_stream(
    connection: RpcConnection, client: AsyncClient
) -> None:
    call = GenerateCall(prompt="abc", sampling_params=SamplingParams(max_tokens=1000))
    outputs = connection.stream(GENERATE, call, RequestOutput, 30)
    async with aclosing(outputs) as items:
        await anext(items)
        # The other call of this connection goes on while nobody reads the first.
        for _ in range(20):
            await connection.unary("coterie.Health", Nothing(), dict[str, Any], 10)
        (queue,) = connection._calls.values()
        assert queue.qsize() < protocol.CHUNK_WINDOW
        assert len([item async for item in items]) == 999


async def test_unknown_method_and_payload(connection: RpcConnection) -> None:
    with pytest.raises(NotFound, match="coterie.Generate") as unknown:
        await connection.unary("coterie.Fly", Nothing(), Nothing, 5)
    assert unknown.value.status == "UNIMPLEMENTED"
    with pytest.raises(InvalidRequest, match="malformed"):
        await connection.unary("coterie.Tokenize", {"text": 5}, Nothing, 5)
    assert not connection.closed


def test_sync_client(scripted_server: Any) -> None:
    with Client(port=scripted_server.rpc_port, timeout_s=20) as client:
        assert client.generate("ab", max_tokens=3).text == "aba"
        texts = [output.text for output in client.generate("ab", max_tokens=3, stream=True)]
        assert "".join(texts) == "aba"
        stream = client.generate("hang", stream=True)
        next(stream)
        stream.close()
        scripted_server.engine.wait_idle()
        assert client.chat([{"role": "user", "content": "hi"}], max_tokens=4).text == "user"
        assert client.detokenize(client.tokenize("hi")) == "hi"
        assert client.health()["live"]
        assert client.status()["ranks"]
        assert client.models()
    with pytest.raises(InvalidRequest, match="closed"):
        client.health()
    client.close()


async def test_nobody_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        async with AsyncClient(port=sock.getsockname()[1]) as client:
            with pytest.raises(EngineDead, match="no Coterie RPC server") as caught:
                await client.health()
    assert caught.value.status == "UNAVAILABLE"


def test_every_error_has_a_status_of_the_wire() -> None:
    def kinds(kind: type[CoterieError]) -> list[type[CoterieError]]:
        return [kind, *(more for below in kind.__subclasses__() for more in kinds(below))]

    for kind in kinds(CoterieError):
        assert protocol.Status(kind.status) is not protocol.Status.OK, kind
    for status in set(protocol.Status) - {protocol.Status.OK}:
        assert protocol.error_of(protocol.RpcEnd(1, status, "x")).status == status.value
    assert protocol.end_of(1, TimeoutError()).status is protocol.Status.DEADLINE_EXCEEDED
    assert protocol.end_of(1, KeyError("secret")).detail == "internal error"


def test_a_client_that_is_never_closed_ends_quietly(scripted_server: Any) -> None:
    code = (
        "import coterie, threading\n"
        f"make = lambda: coterie.Client(port={scripted_server.rpc_port}, timeout_s=20)\n"
        "client, other = make(), make()\n"
        "print(client.generate('ab', max_tokens=3).text)\n"
        "stream = client.generate('hang', stream=True)\n"
        "next(stream)\n"
        "print(other.health()['live'])\n"
        "del other\n"
        "print([t.name for t in threading.enumerate()].count('coterie-client'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("aba\nTrue\n1\n", "", 0)
    scripted_server.engine.wait_idle()


def raw(port: int, *frames: bytes) -> protocol.RpcEnd | None:
    """Send bytes, close our sending half, and return the connection's end frame, if any."""
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        for frame in frames:
            sock.sendall(frame)
        sock.shutdown(socket.SHUT_WR)
        data = bytearray()
        while chunk := sock.recv(4096):
            data += chunk
    if not data:
        return None
    end: Any = codec.decode(codec.decoder(protocol.TO_CLIENT), bytes(data[4:]))
    return end


CALL = codec.encode(
    protocol.RpcCall(0, "coterie.Health", 0, msgspec.Raw(msgspec.msgpack.encode({})))
)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", 2**31),
        struct.pack("<I", 17 << 20),
        codec.encode({"a": 1}),
        codec.encode([255, 1, 2]),
        codec.encode([97, "x"]),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        CALL,  # call id 0
        codec.encode(protocol.RpcOpen(protocol=9)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_broken_frames_end_the_connection(scripted_server: Any, frame: bytes) -> None:
    end = raw(scripted_server.rpc_port, frame)
    assert end is not None
    assert (end.call_id, end.status) == (0, protocol.Status.INVALID_ARGUMENT)
    assert end.detail


@pytest.mark.parametrize("frame", [b"", b"\x05", struct.pack("<I", 10) + b"half"])
def test_half_a_frame_is_no_news(scripted_server: Any, frame: bytes) -> None:
    assert raw(scripted_server.rpc_port, frame) is None


async def test_api_key(
    byte_tokenizer: Any, server_over: Callable[..., Any], scripted_server: Any
) -> None:
    async def make() -> Any:
        return type(scripted_server.engine)(byte_tokenizer)

    with server_over(make, api_key="secret", limits=RpcLimits(max_calls=2)) as server:
        for key in (None, "wrong"):
            async with AsyncClient(port=server.rpc_port, api_key=key) as client:
                with pytest.raises(HandshakeError, match="API key") as caught:
                    await client.health()
                assert caught.value.status == "UNAUTHENTICATED"
        async with AsyncClient(port=server.rpc_port, api_key="secret") as client:
            assert (await client.health())["live"]
            hanging = [await client.generate("hang", stream=True) for _ in range(2)]
            for stream in hanging:
                await anext(stream)
            with pytest.raises(QueueFull, match="calls are open"):
                await client.health()
            for stream in hanging:
                await stream.aclose()


def test_the_sdk_needs_no_heavy_library() -> None:
    code = (
        "import sys, coterie; coterie.Client; coterie.AsyncClient; coterie.SamplingParams\n"
        "heavy = {'torch', 'ray', 'transformers', 'tokenizers', 'numpy', 'fastapi', 'numba'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
