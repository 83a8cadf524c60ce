"""The tool server: `arborl tools serve`. FastAPI around a `Desk`; needs the extra `serve`."""

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
from arborl.sandbox import POOLS, level_in_force
from arborl.tools.dispatcher import Busy, Desk, Draining, Reused
from arborl.tools.gate import Gate, HalfOpen, listening, say
from arborl.tools.journal import Unusable
from arborl.tools.json_bounds import JsonBounds, JsonBoundsError, load_json
from arborl.tools.limit import LimitTimeout, RateLimit
from arborl.tools.protocol import (
    MOST_DEEP,
    MOST_VALUES,
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
    key_bytes,
)
from arborl.tools.threads import in_thread, stuck_calls
from arborl.types import ToolResult

if TYPE_CHECKING:
    import uvicorn

MAX_LIMITS = 1000
BODY_BOUNDS = JsonBounds(depth=MOST_DEEP + 2, values=MOST_VALUES)
PARSED_AT_ONCE = 2**16
"""Bytes of a body that is parsed on the event loop; a larger one is parsed in a thread."""
FAULTS_NAMED = 20
RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "wrong or missing API key; nothing was run"},
    409: {"model": Problem, "description": "the same name or key is in use for something else; nothing was run"},
    413: {"model": Problem, "description": "the body is too large"},
    421: {"model": Problem, "description": "not meant for this machine, and no API key is set; nothing was run"},
    422: {"model": Problem, "description": "the body is not a request"},
    429: {"model": Problem, "description": "too many calls are waiting; nothing was run"},
    503: {"model": Problem, "description": "about to stop, or the journal cannot be used; nothing was run"},
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
        api_key: every request but `/health` must bring it, as `Authorization: Bearer …` or `X-API-Key: …`. Without one,
            only requests to an address or to `localhost` are answered.
        max_body: bytes of a request.
        limit_seconds: longest wait for a grant of a rate limit within one request.
        drain_seconds: how long running calls have to end when the server stops.
        extra: what else lives as long as the application (the MCP endpoint).
    """
    half_open, limits = HalfOpen(), Limits(limit_seconds)
    meters = Meters(desk, half_open)
    desk.watch = meters.count
    app = FastAPI(
        title="Arbor tool server", responses=RESPONSES, lifespan=_lifespan(desk, drain_seconds, extra, limits)
    )
    app.state.half_open = half_open
    app.router.route_class = BoundedRoute
    app.add_middleware(Gate, key=None if api_key is None else key_bytes(api_key), max_body=max_body)
    _add_calls(app, desk)
    _add_limits(app, limits)
    _add_health(app, desk, meters)
    app.add_exception_handler(Busy, _problem(429, {"Retry-After": "1"}))
    app.add_exception_handler(Draining, _problem(503, {"Retry-After": "2"}))
    app.add_exception_handler(Unusable, _problem(503, {"Retry-After": "2"}))
    app.add_exception_handler(Reused, _problem(409))
    app.add_exception_handler(ConfigError, _problem(409))
    app.add_exception_handler(RequestValidationError, _not_a_request)
    return app


class BoundedRequest(Request):
    """A request whose JSON is counted before it is parsed."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) <= PARSED_AT_ONCE:
                return load_json(body, BODY_BOUNDS)
            return await in_thread(functools.partial(load_json, body, BODY_BOUNDS))
        except JsonBoundsError as error:
            raise HTTPException(422, f"body: {error}") from error


class BoundedRoute(APIRoute):
    """A route that reads its body within `BODY_BOUNDS`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return bounded


def _lifespan(desk: Desk, drain_seconds: float, extra: Sequence[Any], limits: Limits) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for each in extra:
                await stack.enter_async_context(asynccontextmanager(each)(app))
            yield
            await desk.drain(drain_seconds)
            limits.forget()

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

    if "python" in desk.toolbox.tools:
        _add_execute(app, desk)

    @app.delete("/sessions/{name}", status_code=204)
    async def end_session(name: str) -> Response:
        """End a session: its state is closed."""
        if re.fullmatch(PLAIN, name):
            await desk.end_session(name)
        return Response(status_code=204)


def _add_execute(app: FastAPI, desk: Desk) -> None:
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


class Limits:
    """The rate limits that clients share by name.

    One that owes nothing is forgotten, with its file, where it is in the way and when the server stops: made anew, it
    would grant the same. One that has granted ahead is kept on disk, so that a restart grants nobody twice.
    """

    def __init__(self, longest_wait: float):
        self.longest_wait = longest_wait
        self._made: dict[tuple[str, float, int], RateLimit] = {}

    def get(self, body: LimitRequest) -> RateLimit:
        key = (body.name, body.per_minute, body.burst)
        if key not in self._made and len(self._made) >= MAX_LIMITS:
            self.forget()
            if len(self._made) >= MAX_LIMITS:
                raise Busy(f"{MAX_LIMITS} limits are in use")
        if key not in self._made:
            self._made[key] = RateLimit(body.per_minute, body.burst, f"cluster {encodable(body.name)}")
        return self._made[key]

    def forget(self) -> None:
        self._made = {key: limit for key, limit in self._made.items() if not limit.forget()}


def _add_limits(app: FastAPI, limits: Limits) -> None:
    @app.post("/limit")
    async def limit(body: LimitRequest, request: Request) -> LimitAnswer:
        """Wait for one grant of a rate limit that all who ask by this name share."""
        waiting = limits.get(body).acquire(min(body.timeout, limits.longest_wait))
        granted = asyncio.create_task(waiting)
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

    def __init__(self, desk: Desk, half_open: HalfOpen):
        self.registry = CollectorRegistry()
        self._calls = Counter("arborl_tool_calls", "calls that were run", ["tool", "kind"], registry=self.registry)
        self._seconds = Histogram("arborl_tool_seconds", "time a call took", ["tool"], registry=self.registry)
        for name, about, read in (
            ("running", "calls that run", lambda: desk.running),
            ("waiting", "calls that wait", lambda: desk.waiting),
            ("replayed", "answered again", lambda: desk.replayed),
            ("half_open", "connections without a whole request", lambda: len(half_open)),
            ("half_open_closed", "those closed because it did not come", lambda: half_open.closed),
        ):
            Gauge(f"arborl_tool_{name}", about, registry=self.registry).set_function(read)
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


def _problem(status: int, headers: dict[str, str] | None = None) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handler(request: Request, error: Exception) -> Response:
        return say(status, str(error), headers)

    return handler


async def _not_a_request(request: Request, error: Exception) -> Response:
    """Says what is wrong without repeating what was sent, which may have no JSON form."""
    faults = error.errors()[:FAULTS_NAMED] if isinstance(error, RequestValidationError) else []
    clauses = [f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg', '')}" for fault in faults]
    return say(422, "; ".join(clauses)[:2000] or "not a request")


def serve(app: FastAPI, host: str, port: int, drain_seconds: float = 30.0) -> None:
    """Serve until a signal asks to stop; then let running calls end."""
    make_server(app, host, port, drain_seconds).run()


def make_server(app: FastAPI, host: str, port: int, drain_seconds: float = 30.0) -> uvicorn.Server:
    """The application behind sockets."""
    import uvicorn

    return uvicorn.Server(listening(app, host, port, int(drain_seconds)))
