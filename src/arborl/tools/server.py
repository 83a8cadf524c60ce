"""The tool server: `arborl tools serve`. FastAPI around a `Desk`; needs the extra `serve`."""

from __future__ import annotations

import asyncio
import functools
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from arborl.errors import ConfigError
from arborl.sandbox import POOLS, level_in_force
from arborl.tools.desk import Busy, Desk, Draining
from arborl.tools.limit import LimitTimeout, RateLimit
from arborl.tools.threads import stuck_calls
from arborl.tools.wire import (
    PLAIN,
    About,
    CallAnswer,
    CallRequest,
    ExecuteAnswer,
    ExecuteRequest,
    Health,
    LimitAnswer,
    LimitRequest,
    Problem,
    encodable,
)
from arborl.types import ToolResult

OPEN = ("/health",)
"""Paths that need no key."""
MAX_LIMITS = 1000
RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "wrong or missing API key; nothing was run"},
    413: {"model": Problem, "description": "the body is too large"},
    422: {"model": Problem, "description": "the body is not a request"},
    429: {"model": Problem, "description": "too many calls are waiting; nothing was run"},
    503: {"model": Problem, "description": "about to stop; nothing was run"},
}


def make_app(
    desk: Desk,
    api_key: str | None = None,
    max_body: int = 2**21,
    limit_seconds: float = 60.0,
    drain_seconds: float = 30.0,
    extra: Sequence[Callable[[FastAPI], AsyncIterator[None]]] = (),
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        desk: answers the calls.
        api_key: every request but `/health` must bring it, as `Authorization: Bearer …` or `X-API-Key: …`.
        max_body: bytes of a request.
        limit_seconds: longest wait for a grant of a rate limit within one request.
        drain_seconds: how long running calls have to end when the server stops.
        extra: what else lives as long as the application (the MCP endpoint).
    """
    meters = Meters(desk)
    desk.watch = meters.count
    app = FastAPI(title="Arbor tool server", responses=RESPONSES, lifespan=_lifespan(desk, drain_seconds, extra))
    app.add_middleware(Gate, api_key=api_key, max_body=max_body)
    _add_calls(app, desk)
    _add_limits(app, limit_seconds)
    _add_health(app, desk, meters)
    app.add_exception_handler(Busy, _problem(429, {"Retry-After": "1"}))
    app.add_exception_handler(Draining, _problem(503, {"Retry-After": "2"}))
    app.add_exception_handler(ConfigError, _problem(409))
    app.add_exception_handler(RequestValidationError, _not_a_request)
    return app


def _lifespan(desk: Desk, drain_seconds: float, extra: Sequence[Any]) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for each in extra:
                await stack.enter_async_context(asynccontextmanager(each)(app))
            yield
            await desk.drain(drain_seconds)

    return lifespan


def _add_calls(app: FastAPI, desk: Desk) -> None:
    @app.get("/tools")
    async def tools() -> list[About]:
        """What may be called."""
        return desk.about()

    @app.post("/call")
    async def call(request: CallRequest) -> CallAnswer:
        """Call one tool. What goes wrong in the tool is an answer with `ok: false`."""
        return await desk.answer(request)

    @app.post("/execute")
    async def execute(request: ExecuteRequest) -> ExecuteAnswer:
        """Run Python in a sandbox of its own."""
        outcome = await desk.execute(request.code)
        return ExecuteAnswer(
            success=outcome.ok,
            output=encodable("\n".join(filter(None, (outcome.stdout.rstrip("\n"), outcome.value)))),
            error=None if outcome.ok else encodable(outcome.stderr.strip() or outcome.error),
            execution_time=outcome.seconds,
        )

    @app.delete("/sessions/{name}", status_code=204)
    async def end_session(name: str) -> Response:
        """End a session: its state is closed."""
        if re.match(PLAIN, name):
            await desk.end_session(name)
        return Response(status_code=204)


def _add_limits(app: FastAPI, limit_seconds: float) -> None:
    limits: dict[tuple[str, float, int], RateLimit] = {}

    @app.post("/limit", responses={409: {"model": Problem, "description": "others use that name with other numbers"}})
    async def limit(body: LimitRequest, request: Request) -> LimitAnswer:
        """Wait for one grant of a rate limit that all who ask by this name share."""
        key = (body.name, body.per_minute, body.burst)
        if key not in limits and len(limits) >= MAX_LIMITS:
            raise Busy(f"{MAX_LIMITS} limits are in use")
        shared = limits.setdefault(key, RateLimit(body.per_minute, body.burst, f"cluster {encodable(body.name)}"))
        granted = asyncio.create_task(shared.acquire(min(body.timeout, limit_seconds)))
        while not granted.done():
            await asyncio.wait([granted], timeout=1.0)
            if not granted.done() and await request.is_disconnected():
                granted.cancel()  # its turn goes to the others
                await asyncio.wait([granted])
        if granted.cancelled():
            return LimitAnswer(granted=False)
        if isinstance(granted.exception(), LimitTimeout):
            return LimitAnswer(granted=False)
        granted.result()
        return LimitAnswer(granted=True)


def _add_health(app: FastAPI, desk: Desk, meters: Meters) -> None:
    level = level_in_force().name if any(name == "python" for name in desk.toolbox.tools) else None

    @app.get("/health")
    async def health() -> Health:
        """Whether the server takes calls; needs no key."""
        status = "draining" if desk.draining else "ok"
        return Health(status=status, running=desk.running, waiting=desk.waiting, sandbox=level)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)


class Meters:
    """The server's numbers."""

    def __init__(self, desk: Desk):
        self.registry = CollectorRegistry()
        self._calls = Counter("arborl_tool_calls", "calls that were run", ["tool", "kind"], registry=self.registry)
        self._seconds = Histogram("arborl_tool_seconds", "time a call took", ["tool"], registry=self.registry)
        for name, about in (
            ("running", "calls that run"),
            ("waiting", "calls that wait"),
            ("replayed", "answered again"),
        ):
            gauge = Gauge(f"arborl_tool_{name}", about, registry=self.registry)
            gauge.set_function(functools.partial(getattr, desk, name))
        stuck = Gauge("arborl_tool_stuck", "calls that hang in threads", ["tool"], registry=self.registry)
        for name in desk.toolbox.tools:
            stuck.labels(name).set_function(functools.partial(stuck_calls, name))
        queue = Gauge("arborl_sandbox_waiting", "code that waits for a sandbox", registry=self.registry)
        queue.set_function(lambda: sum(pool.waiting for pool in list(POOLS)))

    def count(self, name: str, result: ToolResult) -> None:
        self._calls.labels(name, result.kind).inc()
        self._seconds.labels(name).observe(result.seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Gate:
    """Before anything else reads a request: is the key right, and is the body small enough?"""

    def __init__(self, app: Any, api_key: str | None, max_body: int):
        self.app, self.api_key, self.max_body = app, api_key, max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self.api_key is not None and scope["path"] not in OPEN and not self._has_key(headers):
            await _say(401, "wrong or missing API key", {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_body:
            await _say(413, f"a body may have {self.max_body:,} bytes")(scope, receive, send)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:  # sent in pieces, without saying how many
                raise RequestValidationError([{"msg": f"a body may have {self.max_body:,} bytes", "loc": ("body",)}])
            return message

        await self.app(scope, counted, send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return hmac.compare_digest(given, str(self.api_key).encode())


def _say(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": encodable(detail)}, status, headers)


def _problem(status: int, headers: dict[str, str] | None = None) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handler(request: Request, error: Exception) -> Response:
        return _say(status, str(error), headers)

    return handler


async def _not_a_request(request: Request, error: Exception) -> Response:
    """Says what is wrong without repeating what was sent, which may have no JSON form."""
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    clauses = [f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg', '')}" for fault in faults]
    return _say(422, "; ".join(clauses)[:2000] or "not a request")


def serve(app: FastAPI, host: str, port: int, drain_seconds: float = 30.0) -> None:
    """Serve until a signal asks to stop; then let running calls end."""
    import uvicorn

    config = uvicorn.Config(
        app, host, port, log_level="warning", timeout_graceful_shutdown=int(drain_seconds), access_log=False
    )
    uvicorn.Server(config).run()
