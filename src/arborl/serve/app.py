"""The server as an application: routes, their door, health and numbers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from arborl.serve.agents import agent_routes
from arborl.serve.chat import chat_routes
from arborl.serve.door import Door, Load
from arborl.serve.keys import Keys, Rates
from arborl.serve.parsing import RequestWorkers
from arborl.serve.problems import add_problems
from arborl.serve.responses import response_routes
from arborl.serve.sessions import Sessions
from arborl.serve.source import Refused
from arborl.serve.speaker import Speaker
from arborl.tools.remote.http_middleware import PendingConnections

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may take."""

    requests: int = 1024
    """Answered at once."""
    body: int = 2**24
    """Bytes of a request."""
    seconds: float = 600.0
    """For one answer."""
    per_minute: float = 0.0
    """Requests of one key; 0 for no limit."""
    burst: int = 10
    """Of these, at once."""


def make_app(
    speaker: Speaker,
    sessions: Sessions | None = None,
    keys: Keys | None = None,
    bounds: Bounds | None = None,
    extra: Sequence[Callable[[], AbstractAsyncContextManager[Any]]] = (),
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        speaker: the model.
        sessions: of its agents, where it has some.
        keys: of whom may ask; without any, only requests for an address or for `localhost` are answered.
        bounds: on what they take.
        extra: what else lives as long as the application (what follows a run, for instance).
    """
    bounds, keys = bounds or Bounds(), keys or Keys()
    load, rates = Load(bounds.requests), Rates(keys.names, bounds.per_minute, bounds.burst)
    workers = RequestWorkers()
    if sessions is not None:
        sessions.keys = len(keys) or 1

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for each in extra:
                await stack.enter_async_context(each())
            yield
            if sessions is not None:
                await sessions.close()
            rates.forget()

    app = FastAPI(title="Arbor", lifespan=lifespan)
    app.state.load, app.state.half_open = load, PendingConnections()
    meters = Meters(load, speaker, sessions)
    app.add_middleware(Door, keys=keys, max_body=bounds.body, load=load, rates=rates, seen=meters.count)
    add_problems(app)

    def source_of(request: Request) -> Speaker:
        return speaker

    app.include_router(chat_routes(source_of, bounds.seconds, workers=workers))
    app.include_router(response_routes(source_of, bounds.seconds, workers=workers))
    if sessions is not None:
        app.include_router(agent_routes(sessions, bounds.seconds, workers=workers))
    _add_models(app, speaker)
    _add_health(app, load, speaker, rates, meters)
    return app


def _add_models(app: FastAPI, speaker: Speaker) -> None:
    began = int(time.time())

    def about() -> dict[str, Any]:
        return {"id": speaker.name, "object": "model", "created": began, "owned_by": "arborl",
                "max_model_len": speaker.context, "version": speaker.version}  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """What is served."""
        return {"object": "list", "data": [about()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The one of that name."""
        if name != speaker.name:
            raise Refused(f"no model is called {name!r} here", "model", "model_not_found", 404)
        return about()


def _add_health(app: FastAPI, load: Load, speaker: Speaker, rates: Rates, meters: Meters) -> None:
    def state() -> str:
        failing = speaker.breaker.is_open or rates.fault() is not None
        return "draining" if load.draining else "failing" if failing else "ok"

    @app.get("/live")
    async def live() -> dict[str, str]:
        """Whether the process answers at all."""
        return {"status": "ok"}

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Whether requests should be sent here; 503 where not."""
        return JSONResponse({"status": state()}, 200 if state() == "ok" else 503)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """How it is."""
        return {"status": state(), "model": speaker.name, "version": speaker.version, "running": load.running}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)


class Meters:
    """The server's numbers."""

    def __init__(self, load: Load, speaker: Speaker, sessions: Sessions | None):
        self.speaker, self.registry = speaker, CollectorRegistry()
        self._requests = Counter("arborl_requests", "requests", ["route", "status"], registry=self.registry)
        about = "from a request to its last byte"
        self._seconds = Histogram("arborl_request_seconds", about, ["route"], registry=self.registry, buckets=SECONDS)
        self._engine: dict[str, Counter] = {}
        for name, about, read in (
            ("running", "requests that are being answered", lambda: load.running),
            ("model_version", "step of the weights", lambda: speaker.version),
            ("breaker_open", "whether the model fails", lambda: float(speaker.breaker.is_open)),
            ("sessions", "sessions of agents", lambda: len(sessions) if sessions is not None else 0),
        ):
            Gauge(f"arborl_{name}", about, registry=self.registry).set_function(read)

    def count(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Engines count since they were last asked; here numbers grow."""
        for name, value in self.speaker.engine.metrics().items():
            plain = f"arborl_{name.replace('/', '_')}"
            if name in ("engine/hit_rate", "engine/block_usage"):
                continue
            if name not in self._engine:
                self._engine[name] = Counter(plain, "of the engine", registry=self.registry)
            self._engine[name].inc(value)
        return generate_latest(self.registry)
