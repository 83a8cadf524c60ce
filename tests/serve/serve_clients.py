"""Servers for tests: behind a real socket; and the application without one, for what needs no streaming."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

import httpx

from arborl.serve.api_server import ApiServer, ServerLimits, make_app
from arborl.serve.middleware import ApiKeys
from arborl.serve.model_loading import LoadedModel
from arborl.serve.sessions import SessionStore


@contextmanager
def running(loaded: LoadedModel, keys=(), limits=None, extra=()):
    """The address of a server in a thread; drained at the end."""
    loop, up, server = asyncio.new_event_loop(), threading.Event(), None
    said: list[str] = []

    async def serve() -> None:
        nonlocal server
        app = make_app(
            loaded.backend, SessionStore(loaded.agents, max_sessions=4), ApiKeys(keys), limits or ServerLimits(), extra
        )
        server = ApiServer(app, "127.0.0.1", 0, drain_seconds=10)
        server.on_start = lambda at: (said.append(at), up.set())
        await server.serve()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert up.wait(30)
    assert server is not None
    try:
        yield said[0]
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        loop.close()


@asynccontextmanager
async def client_of(loaded, keys=(), limits=None, backend=None, sessions=4):
    app = make_app(backend or loaded.backend, SessionStore(loaded.agents, max_sessions=sessions), ApiKeys(keys), limits)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60) as client,
    ):
        yield client
