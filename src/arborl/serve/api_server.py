"""The FastAPI application of `arborl serve` (routes, health, Prometheus metrics) and its uvicorn server."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from arborl.serve.engine_backend import EngineBackend
from arborl.serve.middleware import ApiKeys, ApiMiddleware, KeyRateLimits, RequestLoad, add_error_handlers
from arborl.serve.model_backend import RequestError
from arborl.serve.openai_routes import openai_routes
from arborl.serve.parsing import RequestWorkers
from arborl.serve.session_routes import session_routes
from arborl.serve.sessions import SessionStore
from arborl.tools.remote.http_middleware import PendingConnections, uvicorn_config

BUCKET_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits for clients."""

    max_requests: int = 1024
    max_body_bytes: int = 2**24
    answer_seconds: float = 600.0
    """Time limit of one answer."""
    per_minute: float = 0.0
    """Requests per minute of one key; 0 for no limit."""
    burst: int = 10
    """Requests at once after a pause, of those per minute."""


def make_app(
    backend: EngineBackend,
    sessions: SessionStore | None = None,
    keys: ApiKeys | None = None,
    limits: ServerLimits | None = None,
    extra: Sequence[Callable[[], AbstractAsyncContextManager[Any]]] = (),
) -> FastAPI:
    limits, keys = limits or ServerLimits(), keys or ApiKeys()
    load, workers = RequestLoad(limits.max_requests), RequestWorkers()
    rates = KeyRateLimits(keys.names, limits.per_minute, limits.burst)
    if sessions is not None:
        sessions.num_keys = len(keys) or 1

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for context in extra:
                await stack.enter_async_context(context())
            yield
            if sessions is not None:
                await sessions.close()
            rates.remove_files()

    app = FastAPI(title="Arbor", lifespan=lifespan)
    app.state.load, app.state.half_open = load, PendingConnections()
    metrics = ServerMetrics(load, backend, sessions)
    app.add_middleware(
        ApiMiddleware, keys=keys, max_body=limits.max_body_bytes, load=load, rates=rates, on_request=metrics.observe
    )
    add_error_handlers(app)
    app.include_router(openai_routes(lambda request: backend, limits.answer_seconds, workers=workers))
    if sessions is not None:
        app.include_router(session_routes(sessions, limits.answer_seconds, workers=workers))
    _add_models(app, backend)
    _add_health(app, load, backend, rates, metrics)
    return app


def _add_models(app: FastAPI, backend: EngineBackend) -> None:
    created = int(time.time())

    def model_object() -> dict[str, Any]:
        return {"id": backend.name, "object": "model", "created": created, "owned_by": "arborl",
                "max_model_len": backend.max_context, "version": backend.version}  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [model_object()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe a model."""
        if name != backend.name:
            raise RequestError(f"unknown model {name!r}", "model", "model_not_found", 404)
        return model_object()


def _add_health(
    app: FastAPI, load: RequestLoad, backend: EngineBackend, rates: KeyRateLimits, metrics: ServerMetrics
) -> None:
    def state() -> str:
        is_failing = backend.breaker.is_open or rates.failure() is not None
        return "draining" if load.is_draining else "failing" if is_failing else "ok"

    @app.get("/live")
    async def live() -> dict[str, str]:
        """Liveness probe."""
        return {"status": "ok"}

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Readiness probe; 503 if the server does not accept requests."""
        return JSONResponse({"status": state()}, 200 if state() == "ok" else 503)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """State, model, policy version and running requests."""
        return {"status": state(), "model": backend.name, "version": backend.version, "running": load.num_running}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Metrics in Prometheus format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


class ServerMetrics:
    """Prometheus metrics of the server and its engine."""

    def __init__(self, load: RequestLoad, backend: EngineBackend, sessions: SessionStore | None):
        self.backend, self.registry = backend, CollectorRegistry()
        self._requests = Counter("arborl_requests", "requests", ["route", "status"], registry=self.registry)
        self._seconds = Histogram(
            "arborl_request_seconds", "duration of a request", ["route"], registry=self.registry, buckets=BUCKET_SECONDS
        )
        self._engine: dict[str, Counter] = {}
        for name, description, read in (
            ("running", "running requests", lambda: load.num_running),
            ("model_version", "policy version", lambda: backend.version),
            (
                "breaker_open",
                "whether the circuit breaker of the engine is open",
                lambda: float(backend.breaker.is_open),
            ),
            ("sessions", "open agent sessions", lambda: len(sessions) if sessions is not None else 0),
        ):
            Gauge(f"arborl_{name}", description, registry=self.registry).set_function(read)

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """All metrics. An engine reports differences since the last call; counters add them up."""
        for name, value in self.backend.engine.metrics().items():
            if name in ("engine/hit_rate", "engine/block_usage"):
                continue
            if name not in self._engine:
                label = f"arborl_{name.replace('/', '_')}"
                self._engine[name] = Counter(label, "engine metric", registry=self.registry)
            self._engine[name].inc(value)
        return generate_latest(self.registry)


class ApiServer(uvicorn.Server):
    """Stops in two steps after a signal: it refuses new requests with Retry-After and finishes the running ones, then
    closes its socket. A second signal stops it at once."""

    def __init__(self, app: FastAPI, host: str, port: int, drain_seconds: float = 60.0):
        super().__init__(uvicorn_config(app, host, port, 5, backlog=4096))
        self.load: RequestLoad = app.state.load
        self.drain_seconds = drain_seconds
        self.loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.on_start: Callable[[str], None] = lambda url: None
        """Called with the URL when the server accepts requests; the system may have chosen the port."""

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)  # type: ignore[arg-type]
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.load.is_draining or self.loop is None:
            self.should_exit, self.force_exit = True, sig == signal.SIGINT
        else:
            self.load.is_draining = True
            self.loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        self._stopping = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self.load.drain(self.drain_seconds)
        await asyncio.sleep(0.1)  # last bytes are sent, and clients that connect now receive a refusal
        self.should_exit = True
