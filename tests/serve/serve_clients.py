"""Servers and clients for tests: behind a real socket, and in-process for tests without streaming."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

import httpx

from arborl.serve.api_server import ApiServer, make_app
from arborl.serve.middleware import ApiKeys
from arborl.serve.sessions import SessionStore

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
CHAT = "/v1/chat/completions"


@contextmanager
def running(loaded, keys=(), limits=None, extra=()):
    """The URL of a server in a thread; it is drained at the end."""
    loop, started, server, urls = asyncio.new_event_loop(), threading.Event(), None, []

    async def serve() -> None:
        nonlocal server
        store = SessionStore(loaded.agents, max_sessions=4)
        app = make_app(loaded.backend, store, ApiKeys(keys), limits, extra)
        server = ApiServer(app, "127.0.0.1", 0, drain_seconds=10)
        server.on_start = lambda url: (urls.append(url), started.set())
        await server.serve()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        loop.close()


@asynccontextmanager
async def client_of(loaded, keys=(), limits=None, backend=None, sessions=4):
    """A client of the application, without a socket."""
    app = make_app(backend or loaded.backend, SessionStore(loaded.agents, sessions), ApiKeys(keys), limits)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60) as client,
    ):
        yield client
