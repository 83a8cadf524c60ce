"""The tool server: `arborl tools serve`. FastAPI around a `ToolDispatcher`."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from arborl.errors import ConfigError
from arborl.sandbox import POOLS, active_level
from arborl.tools.core.background_threads import num_hanging_calls, run_in_thread
from arborl.tools.core.json_bounds import JsonBounds, JsonBoundsError, load_json
from arborl.tools.core.rate_limit import RateLimit, RateLimitTimeout
from arborl.tools.remote import tool_protocol as protocol
from arborl.tools.remote.http_middleware import PendingConnections, RequestFilter, error_response, uvicorn_config
from arborl.tools.remote.tool_dispatcher import (
    JournalUnavailable,
    KeyReused,
    ServerDraining,
    ToolDispatcher,
    TooManyCalls,
)
from arborl.types import ToolResult

if TYPE_CHECKING:
    import uvicorn

MAX_RATE_LIMITS = 1000
BODY_BOUNDS = JsonBounds(depth=protocol.MAX_DEPTH + 2, values=protocol.MAX_VALUES)
MAX_INLINE_PARSE = 2**16  # larger bodies are parsed in a thread
MAX_NAMED_ERRORS = 20
STATUS_TEXT = {
    401: "wrong or missing API key; nothing was run",
    409: "the name or key is in use for something else; nothing was run",
    413: "the body is too large",
    421: "foreign host name, and no API key is set; nothing was run",
    422: "the body is not a valid request",
    429: "too many calls are waiting; nothing was run",
    503: "the server is stopping, or the journal cannot be used; nothing was run",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": protocol.ErrorResponse, "description": text} for status, text in STATUS_TEXT.items()
}


def make_app(
    dispatcher: ToolDispatcher,
    api_key: str | None = None,
    max_body: int = 2**21,
    limit_seconds: float = 60.0,
    drain_seconds: float = 30.0,
    extra: Sequence[Callable[[FastAPI], AsyncIterator[None]]] = (),
) -> FastAPI:
    pending, limits = PendingConnections(), SharedRateLimits(limit_seconds)
    metrics = ToolServerMetrics(dispatcher, pending)
    dispatcher.on_result = metrics.count
    lifespan = _lifespan(dispatcher, drain_seconds, extra, limits)
    app = FastAPI(title="Arbor tool server", responses=RESPONSES, lifespan=lifespan)
    app.state.half_open = pending
    app.router.route_class = BoundedRoute
    key = None if api_key is None else protocol.encode_api_key(api_key)
    app.add_middleware(RequestFilter, key=key, max_body=max_body)
    _add_calls(app, dispatcher)
    _add_limits(app, limits)
    _add_health(app, dispatcher, metrics)
    for kind, status, retry in (
        (TooManyCalls, 429, "1"), (ServerDraining, 503, "2"), (JournalUnavailable, 503, "2"), (KeyReused, 409, ""),
        (ConfigError, 409, ""),
    ):  # fmt: skip
        app.add_exception_handler(kind, _error_handler(status, {"Retry-After": retry} if retry else None))
    app.add_exception_handler(RequestValidationError, _invalid_request)
    return app


class BoundedRequest(Request):
    """A request with bounded JSON."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) <= MAX_INLINE_PARSE:
                return load_json(body, BODY_BOUNDS)
            return await run_in_thread(functools.partial(load_json, body, BODY_BOUNDS))
        except JsonBoundsError as error:
            raise HTTPException(422, f"body: {error}") from error


class BoundedRoute(APIRoute):
    """A route whose body is parsed within `BODY_BOUNDS`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return bounded


def _lifespan(dispatcher: ToolDispatcher, drain_seconds: float, extra: Sequence[Any], limits: SharedRateLimits) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for each in extra:
                await stack.enter_async_context(asynccontextmanager(each)(app))
            yield
            await dispatcher.drain(drain_seconds)
            limits.remove_unused()

    return lifespan


def _add_calls(app: FastAPI, dispatcher: ToolDispatcher) -> None:
    @app.get("/tools")
    async def tools() -> list[protocol.ToolDescription]:
        """The tools."""
        return dispatcher.descriptions()

    @app.post("/call")
    async def call(request: protocol.CallRequest) -> protocol.CallResponse:
        """Run one call. A failed call has `ok: false`."""
        return await dispatcher.call(request)

    if "python" in dispatcher.toolbox.tools:
        _add_execute(app, dispatcher)

    @app.delete("/sessions/{name}", status_code=204)
    async def end_session(name: str) -> Response:
        """Close the state of a session."""
        if re.fullmatch(protocol.VISIBLE_ASCII, name):
            await dispatcher.end_session(name)
        return Response(status_code=204)


def _add_execute(app: FastAPI, dispatcher: ToolDispatcher) -> None:
    @app.post("/execute")
    async def execute(request: protocol.ExecuteRequest) -> protocol.ExecuteResponse:
        """Run Python in a new sandbox."""
        result = await dispatcher.execute(request.code)
        return protocol.ExecuteResponse(
            success=result.ok,
            output=protocol.replace_surrogates("\n".join(filter(None, (result.stdout.rstrip("\n"), result.value)))),
            error=None if result.ok else protocol.replace_surrogates(result.stderr.strip() or result.error),
            execution_time=result.seconds,
        )


class SharedRateLimits:
    """Rate limits that clients share by name. Unused limits are removed with their files when there are too many and
    when the server stops. A limit that has granted calls ahead of time stays on disk, so that a restart does not grant
    them twice."""

    def __init__(self, longest_wait: float):
        self.longest_wait = longest_wait
        self._limits: dict[tuple[str, float, int], RateLimit] = {}

    def get(self, body: protocol.LimitRequest) -> RateLimit:
        key = (body.name, body.per_minute, body.burst)
        if key not in self._limits and len(self._limits) >= MAX_RATE_LIMITS:
            self.remove_unused()
            if len(self._limits) >= MAX_RATE_LIMITS:
                raise TooManyCalls(f"{MAX_RATE_LIMITS} rate limits are in use")
        if key not in self._limits:
            name = f"cluster {protocol.replace_surrogates(body.name)}"
            self._limits[key] = RateLimit(body.per_minute, body.burst, name)
        return self._limits[key]

    def remove_unused(self) -> None:
        self._limits = {key: limit for key, limit in self._limits.items() if not limit.remove()}


def _add_limits(app: FastAPI, limits: SharedRateLimits) -> None:
    @app.post("/limit")
    async def limit(body: protocol.LimitRequest, request: Request) -> protocol.LimitResponse:
        """Wait for one grant of a shared rate limit."""
        granted = asyncio.create_task(limits.get(body).acquire(min(body.timeout, limits.longest_wait)))
        while not granted.done():
            await asyncio.wait([granted], timeout=1.0)
            if not granted.done() and await request.is_disconnected():
                granted.cancel()
        try:
            await granted
        except (asyncio.CancelledError, RateLimitTimeout):
            return protocol.LimitResponse(granted=False)
        return protocol.LimitResponse(granted=True)


def _add_health(app: FastAPI, dispatcher: ToolDispatcher, server_metrics: ToolServerMetrics) -> None:
    level = active_level().name if any(name == "python" for name in dispatcher.toolbox.tools) else None

    @app.get("/health")
    async def health() -> protocol.HealthResponse:
        """Whether the server accepts calls; needs no API key."""
        status = "draining" if dispatcher.draining else "ok"
        return protocol.HealthResponse(
            status=status, running=dispatcher.running, waiting=dispatcher.waiting, sandbox=level
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' format."""
        return Response(server_metrics.text(), media_type=CONTENT_TYPE_LATEST)


class ToolServerMetrics:
    """Prometheus metrics of the server."""

    def __init__(self, dispatcher: ToolDispatcher, pending: PendingConnections):
        self.registry = CollectorRegistry()
        self._calls = Counter("arborl_tool_calls", "finished calls", ["tool", "kind"], registry=self.registry)
        self._seconds = Histogram("arborl_tool_seconds", "duration of a call", ["tool"], registry=self.registry)
        for name, about, read in (
            ("running", "running calls", lambda: dispatcher.running),
            ("waiting", "waiting calls", lambda: dispatcher.waiting),
            ("replayed", "repeated requests", lambda: dispatcher.replayed),
            ("half_open", "connections with an incomplete request", lambda: len(pending)),
            ("half_open_closed", "connections closed with an incomplete request", lambda: pending.closed),
        ):
            Gauge(f"arborl_tool_{name}", about, registry=self.registry).set_function(read)
        hanging = Gauge("arborl_tool_hanging", "calls that hang in threads", ["tool"], registry=self.registry)
        for name in dispatcher.toolbox.tools:
            hanging.labels(name).set_function(functools.partial(num_hanging_calls, name))
        queue = Gauge("arborl_sandbox_waiting", "waiting sandbox runs", registry=self.registry)
        queue.set_function(lambda: sum(pool.waiting for pool in list(POOLS)))

    def count(self, name: str, result: ToolResult) -> None:
        self._calls.labels(name, result.kind).inc()
        self._seconds.labels(name).observe(result.seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _error_handler(
    status: int, headers: dict[str, str] | None = None
) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handler(request: Request, error: Exception) -> Response:
        return error_response(status, str(error), headers)

    return handler


async def _invalid_request(request: Request, error: Exception) -> Response:
    """Names the errors without the input, which may have no JSON form."""
    errors = error.errors()[:MAX_NAMED_ERRORS] if isinstance(error, RequestValidationError) else []
    clauses = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in errors]
    return error_response(422, "; ".join(clauses)[:2000] or "not a valid request")


def serve(app: FastAPI, host: str, port: int, drain_seconds: float = 30.0) -> None:
    make_server(app, host, port, drain_seconds).run()


def make_server(app: FastAPI, host: str, port: int, drain_seconds: float = 30.0) -> uvicorn.Server:
    import uvicorn

    return uvicorn.Server(uvicorn_config(app, host, port, int(drain_seconds)))
