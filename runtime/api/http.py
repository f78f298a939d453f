"""The HTTP application: OpenAI routes, health, metrics, status; request ids, API key, error form.

``build_app`` makes the ASGI application; ``http_server`` the uvicorn server that ``serve`` runs on
a socket it has bound. Middleware is plain ASGI, so that streams and disconnects pass untouched.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import coterie
from coterie.errors import CoterieError
from coterie.runtime.api.errors_http import CLIENT_GONE, HttpError, error_response
from coterie.runtime.api.frontend import Frontend
from coterie.runtime.api.openai_routes import openai_router

MAX_BODY_BYTES = 16 << 20
_LOG = logging.getLogger(__name__)


def build_app(
    frontend: Frontend, *, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application of one server.

    Args:
        api_key: asked for as a Bearer token on /v1 and /status; None = open.
    """
    app = FastAPI(title="Coterie", version=coterie.__version__, openapi_url=None)
    app.include_router(openai_router(frontend, max_body_bytes))
    _add_operations(app, frontend)
    app.add_exception_handler(CoterieError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_error)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)
    app.add_middleware(RequestIdMiddleware)
    return app


def _add_operations(app: FastAPI, frontend: Frontend) -> None:
    """Health, metrics, status, version."""

    def health(*asked: str) -> Response:
        state = frontend.health()
        good = all(state[name] for name in asked)
        return JSONResponse(state, status_code=200 if good else 503)

    async def live() -> Response:
        return health("live")

    async def ready() -> Response:
        return health("ready")

    async def both() -> Response:
        return health("live", "ready")

    async def metrics() -> Response:
        await frontend.engine.refresh_counters()
        return Response(frontend.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def status() -> Response:
        return JSONResponse(await frontend.engine.status())

    async def version() -> dict[str, str]:
        return {"version": coterie.__version__}

    app.add_api_route("/health", both, methods=["GET"])
    app.add_api_route("/health/live", live, methods=["GET"])
    app.add_api_route("/health/ready", ready, methods=["GET"])
    app.add_api_route("/ping", both, methods=["GET", "POST"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route("/status", status, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, CoterieError):
        _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(error)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """A client that leaves before its body is complete is no fault of anybody here."""
    _LOG.debug("%s %s: the client left while sending", request.method, request.url.path)
    return Response(status_code=CLIENT_GONE)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(HttpError(error.status_code, message, "invalid_request_error"))
    response.headers.update(error.headers or {})
    return response


class RequestIdMiddleware:
    """Takes over a client's X-Request-Id, or makes one, and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        fine = 0 < len(given) <= 128 and all(0x21 <= byte < 0x7F for byte in given)
        request_id = given if fine else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Refuses requests without the key, except health, metrics and version."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = b"bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path.startswith("/v1") or path == "/status"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if not hmac.compare_digest(scheme.lower() + b" " + key.strip(), self._expected):
                error = HttpError(
                    401, "a valid API key is required", "invalid_request_error", "invalid_api_key"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: ``serve`` owns the signals and one deadline."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    async def ready(self, serving: "asyncio.Task[None]") -> None:
        """Wait until requests are accepted, or raise what ``serve`` raised."""
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if serving.done():
            serving.result()

    def stop(self, drain_s: float) -> None:
        """Accept nothing more; running requests have ``drain_s`` to end."""
        # uvicorn reads this when it shuts down; it declares whole seconds but waits for any.
        self.config.timeout_graceful_shutdown = drain_s  # type: ignore[assignment]
        self.should_exit = True


def http_server(app: Any, log_level: str = "warning") -> HttpServer:
    config = uvicorn.Config(
        app, log_level=log_level, access_log=False, lifespan="off", timeout_keep_alive=30
    )
    return HttpServer(config)
