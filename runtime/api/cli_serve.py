"""``coterie serve``: ports, engine, HTTP and RPC on one event loop, and one deadline to end it all.

Ports are bound before any rank starts, so a port that is taken costs nothing.
"""

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import uvloop

from coterie.errors import ConfigError, EngineDead
from coterie.runtime.api.cli_flags import engine_flags
from coterie.runtime.api.cli_output import StartProgress
from coterie.runtime.api.frontend import Frontend
from coterie.runtime.api.http import HttpServer, build_app, http_server
from coterie.runtime.api.rpc_service import rpc_methods
from coterie.runtime.config import EngineConfig
from coterie.runtime.engine.engine import AsyncEngine
from coterie.runtime.engine_args import engine_config_from_flags
from coterie.runtime.rpc.server import RpcServer

_WATCH_S = 1.0
_TEARDOWN_SHARE = 0.3  # of the deadline, kept for ending the ranks
_FLUSH_S = 1.0  # for answers that are complete but not yet sent
_HURRY_S = 3.0  # for ending the ranks after a second signal


def run(args: argparse.Namespace) -> int:
    config = engine_config_from_flags(**engine_flags(args))
    if args.port == args.rpc_port != 0:
        raise ConfigError(f"--port and --rpc-port are both {args.port}; choose two")
    with bound(args.host, args.port, "--port") as http_socket:
        args.port = http_socket.getsockname()[1]
        with bound(args.host, args.rpc_port, "--rpc-port") as rpc_socket:
            return uvloop.run(_serve(args, config, http_socket, rpc_socket))


@contextlib.contextmanager
def bound(host: str, port: int, flag: str) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: the port is taken, or the interface does not exist.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, OverflowError) as error:
            raise _taken(host, port, flag, error) from error
        sock.setblocking(False)
        yield sock


def listen(sock: socket.socket, flag: str) -> None:
    """Begin to accept; until now clients were refused, which is what a prober understands.

    Raises:
        ConfigError: another server that was starting at the same time has the port now.
    """
    try:
        sock.listen(2048)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _taken(host, port, flag, error) from error


def _taken(host: str, port: int, flag: str, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another with {flag}")


class Signals:
    """SIGINT and SIGTERM: the first asks to stop, the second to hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _serve(
    args: argparse.Namespace,
    config: EngineConfig,
    http_socket: socket.socket,
    rpc_socket: socket.socket,
) -> int:
    signals = Signals()
    engine = await _start(config, signals)
    if engine is None:
        return 130
    frontend = Frontend(engine)
    app = build_app(frontend, api_key=args.api_key, max_body_bytes=args.max_body_bytes)
    http = http_server(app, args.log_level)
    rpc = RpcServer(rpc_methods(frontend), api_key=args.api_key)
    serving: asyncio.Task[None] | None = None
    try:
        listen(http_socket, "--port")
        listen(rpc_socket, "--rpc-port")
        await rpc.start(rpc_socket)
        serving = asyncio.create_task(http.serve(sockets=[http_socket]))
        await http.ready(serving)
        _say_ready(args, engine, rpc_socket)
        failure = await _until_stopped(engine, serving, signals)
    finally:
        await _stop(config.timeouts.shutdown_s, frontend, engine, http, rpc, serving, signals)
    if failure is not None:
        raise EngineDead(failure)
    return 0


async def _start(config: EngineConfig, signals: Signals) -> AsyncEngine | None:
    """Start the engine; None when a signal came first."""
    with StartProgress() as progress:
        starting = asyncio.create_task(AsyncEngine.start(config, progress))
        stop = asyncio.create_task(signals.stop.wait())
        try:
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
            starting.cancel()
            outcome = (await asyncio.gather(starting, return_exceptions=True))[0]
            if isinstance(outcome, AsyncEngine):  # it was ready at this very moment
                await outcome.shutdown(config.timeouts.shutdown_s)
            return None
        finally:
            stop.cancel()


def _say_ready(args: argparse.Namespace, engine: AsyncEngine, rpc_socket: socket.socket) -> None:
    model = engine.served_model_name
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{args.port}"
    key = " -H 'Authorization: Bearer '$KEY" if args.api_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    path = "chat/completions"
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        path, body = "completions", f'{{"model": "{model}", "prompt": [1, 2, 3]}}'
    rpc_port = rpc_socket.getsockname()[1]
    curl = f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"
    ready = f"Coterie is ready: {model} on {url} (HTTP) and {host}:{rpc_port} (RPC)"
    print(f"{ready}\n{curl}", flush=True)


async def _until_stopped(
    engine: AsyncEngine, serving: asyncio.Task[None], signals: Signals
) -> str | None:
    """Wait for a signal; a sentence if the engine or the HTTP server ended first."""
    stop = asyncio.create_task(signals.stop.wait())
    try:
        while True:
            await asyncio.wait({stop, serving}, timeout=_WATCH_S, return_when="FIRST_COMPLETED")
            if stop.done():
                return None
            if serving.done():
                return "the HTTP server ended"
            if not engine.health()["live"]:
                return f"engine died: {_why_dead(engine)}"
    finally:
        stop.cancel()


def _why_dead(engine: AsyncEngine) -> str:
    """What clients are told too: which rank, in which step, and why."""
    errors = [rank["error"] for rank in engine.health()["ranks"] if rank["error"]]
    return "; ".join(dict.fromkeys(errors)) or "see the log above"


async def _stop(
    shutdown_s: float,
    frontend: Frontend,
    engine: AsyncEngine,
    http: HttpServer,
    rpc: RpcServer,
    serving: asyncio.Task[None] | None,
    signals: Signals,
) -> None:
    """Drain, then end the ranks, all before one deadline."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + shutdown_s
    frontend.draining = True  # from here on new requests are answered 503
    hint = "; press Ctrl-C again to hurry" if signals.stop.is_set() else ""
    print(f"Coterie is shutting down{hint}", file=sys.stderr, flush=True)
    drain_s = shutdown_s * (1 - _TEARDOWN_SHARE) if engine.health()["live"] else 0.0
    idle = asyncio.create_task(frontend.idle())
    hurry = asyncio.create_task(signals.hurry.wait())
    await asyncio.wait({idle, hurry}, timeout=drain_s, return_when="FIRST_COMPLETED")
    idle.cancel()
    hurry.cancel()
    await frontend.abort_open()
    http.stop(_FLUSH_S)
    drained = asyncio.create_task(_drained(rpc, serving))
    await asyncio.wait({drained}, timeout=2 * _FLUSH_S)
    left_s = _HURRY_S if signals.hurry.is_set() else ends_at - loop.time()
    await engine.shutdown(max(_FLUSH_S, left_s))


async def _drained(rpc: RpcServer, serving: asyncio.Task[None] | None) -> None:
    closing = asyncio.create_task(rpc.close(_FLUSH_S))
    await asyncio.wait({closing} if serving is None else {closing, serving})
