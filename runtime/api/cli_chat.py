"""``coterie chat``: a conversation in the terminal, with a server (HTTP or RPC) or an own engine.

Whom to talk with is settled before the first line: the server that was named, or else one at the
default address, or else an engine of its own.
On a terminal the line editor is prompt_toolkit's; from a pipe each line is one message. Ctrl-C
ends an answer, Ctrl-D the conversation, /clear forgets it.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import httpx

from coterie.errors import ConfigError, CoterieError, EngineDead, RuntimeFailure
from coterie.runtime import sse
from coterie.runtime.api.cli import DEFAULT_URL
from coterie.runtime.api.cli_flags import (
    engine_flags,
    given_engine_flags,
    model_argument,
    refuse_engine_flags,
)
from coterie.runtime.api.cli_output import StartProgress
from coterie.runtime.api.client import AsyncClient
from coterie.runtime.request import GenerateRequest, SamplingParams

Messages = list[dict[str, Any]]
Ask = Callable[[Messages], AsyncGenerator[str, None]]
_CONNECT_S = 10.0
_READ_S = 300.0


def run(args: argparse.Namespace) -> int:
    model = model_argument(args)
    places = [bool(args.url), bool(args.rpc), model is not None]
    if sum(places) > 1:
        raise ConfigError("name one of MODEL (own engine), --url (HTTP) and --rpc")
    if args.url or args.rpc:
        refuse_engine_flags(args, "--url" if args.url else "--rpc")
    own_engine = model is not None or bool(given_engine_flags(args))
    if own_engine and args.api_key:
        raise ConfigError("--api-key is for a server, not for an engine of its own")
    sampling_params(args).check_ranges()
    return asyncio.run(_chat(args, own_engine))


async def _chat(args: argparse.Namespace, own_engine: bool) -> int:
    async with AsyncExitStack() as stack:
        if own_engine:
            ask = await _ask_own_engine(args, stack)
        elif args.rpc:
            ask = await _ask_rpc(args, stack)
        elif args.url or args.api_key:
            ask = await _ask_http(args, stack)
        else:
            ask = await _ask_anybody(args, stack)
        await converse(ask, args.system, _line_reader())
    return 0


async def _ask_anybody(args: argparse.Namespace, stack: AsyncExitStack) -> Ask:
    try:
        return await _ask_http(args, stack)
    except EngineDead as error:
        print(f"{error}; starting an engine of its own", file=sys.stderr, flush=True)
    return await _ask_own_engine(args, stack)


async def converse(
    ask: Ask, system: str | None, read_line: Callable[[], Awaitable[str | None]]
) -> None:
    """Read lines, print answers, until there are no more lines."""
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := await read_line()) is not None:
        text = line.strip()
        if not text:
            continue
        if text == "/clear":
            messages = list(start)
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            reply = await _answer(ask, asked)
        except CoterieError as error:
            if not sys.stdin.isatty():
                raise
            print(f"error: {error}", file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": reply}]


async def _answer(ask: Ask, messages: Messages) -> str:
    """Print an answer as it comes; Ctrl-C ends it and keeps what there is."""
    pieces: list[str] = []

    async def follow() -> None:
        async with aclosing(ask(messages)) as deltas:
            async for delta in deltas:
                pieces.append(delta)
                print(delta, end="", flush=True)

    task = asyncio.create_task(follow())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    failed = True
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
        failed = False
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if pieces or not failed:
            print(flush=True)
    return "".join(pieces)


def _line_reader() -> Callable[[], Awaitable[str | None]]:
    if not sys.stdin.isatty():

        async def from_pipe() -> str | None:
            return await asyncio.to_thread(sys.stdin.readline) or None

        return from_pipe
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()

    async def from_terminal() -> str | None:
        try:
            return await session.prompt_async("> ")
        except (EOFError, KeyboardInterrupt):
            return None

    return from_terminal


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_tokens,
    )


async def _ask_own_engine(args: argparse.Namespace, stack: AsyncExitStack) -> Ask:
    from coterie.runtime.api.frontend import Frontend
    from coterie.runtime.engine.engine import AsyncEngine
    from coterie.runtime.engine.plan import find_tokenizer
    from coterie.runtime.engine_args import engine_config_from_flags
    from coterie.runtime.model_store import resolve_model

    config = engine_config_from_flags(**engine_flags(args))
    if find_tokenizer(config.model, resolve_model(config.model.model)) is None:
        raise ConfigError("a conversation needs a tokenizer; name one with --tokenizer")
    with StartProgress() as progress:
        engine = await AsyncEngine.start(config, progress)
    stack.push_async_callback(engine.shutdown, config.timeouts.shutdown_s)
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        raise ConfigError(f"{engine.served_model_name} has no chat template; use coterie generate")
    frontend, params = Frontend(engine), sampling_params(args)

    async def ask(messages: Messages) -> AsyncGenerator[str, None]:
        token_ids = await frontend.chat_token_ids(messages)
        request = GenerateRequest(
            request_id=f"chat-{len(messages)}",
            prompt_token_ids=token_ids,
            sampling_params=params,
        )
        outputs = await frontend.submit(request)
        async with aclosing(outputs) as items:
            async for output in items:
                yield output.text

    return ask


async def _ask_rpc(args: argparse.Namespace, stack: AsyncExitStack) -> Ask:
    host, _, port = args.rpc.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"--rpc must be HOST:PORT, got {args.rpc!r}")
    client = AsyncClient(host.strip("[]") or "127.0.0.1", int(port), api_key=args.api_key)
    await stack.enter_async_context(client)
    await client.health()  # no server or a wrong key shows now
    params = sampling_params(args)

    async def ask(messages: Messages) -> AsyncGenerator[str, None]:
        outputs = client.chat_stream(messages, sampling_params=params)
        async with aclosing(outputs) as items:
            async for output in items:
                yield output.text

    return ask


async def _ask_http(args: argparse.Namespace, stack: AsyncExitStack) -> Ask:
    url = (args.url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
    client = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=timeout))
    await _check_server(client, url)
    fields = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_tokens,
        "stream": True,
    }

    async def ask(messages: Messages) -> AsyncGenerator[str, None]:
        body = fields | {"messages": messages}
        try:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise RuntimeFailure(f"{reply.status_code}: {error_message(reply.text)}")
                async for line in sse.lines(reply.aiter_text()):
                    text = delta_text(line)
                    if text:
                        yield text
        except httpx.HTTPError as error:
            raise EngineDead(f"no Coterie server answers at {url}: {error}") from error

    return ask


async def _check_server(client: httpx.AsyncClient, url: str) -> None:
    """Find out that nobody answers before the user has typed a line.

    Raises:
        EngineDead: nobody does, or somebody else.
        RuntimeFailure: a server that refuses us.
    """
    try:
        reply = await client.get(f"{url}/v1/models", timeout=_CONNECT_S)
        known = reply.status_code == 200 and bool(reply.json()["data"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineDead(f"no Coterie server answers at {url}: {error}") from error
    except (ValueError, KeyError, TypeError):
        known = False
    if reply.status_code in (401, 403):
        raise RuntimeFailure(f"{url}: {reply.status_code}: {error_message(reply.text)}")
    if not known:
        raise EngineDead(f"what answers at {url} is no Coterie server ({reply.status_code})")


def delta_text(line: str) -> str:
    """Text of one line of an event stream.

    Raises:
        RuntimeFailure: the server reports an error in the stream.
    """
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return ""
    body = json.loads(data)
    if "error" in body:
        raise RuntimeFailure(str(body["error"].get("message")))
    return "".join(choice["delta"].get("content") or "" for choice in body["choices"])


def error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
