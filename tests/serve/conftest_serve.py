"""Servers for tests: behind a real socket; and the application without one, for what needs no streaming."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

import httpx

from arborl.serve.app import Bounds, make_app
from arborl.serve.keys import Keys
from arborl.serve.opened import Opened
from arborl.serve.run import Server
from arborl.serve.sessions import Sessions


@contextmanager
def running(opened: Opened, keys=(), bounds=None, extra=()):
    """The address of a server in a thread; drained at the end."""
    loop, up, server = asyncio.new_event_loop(), threading.Event(), None
    said: list[str] = []

    async def serve() -> None:
        nonlocal server
        app = make_app(opened.speaker, Sessions(opened.company, most=4), Keys(keys), bounds or Bounds(), extra)
        server = Server(app, "127.0.0.1", 0, drain=10)
        server.said = lambda at: (said.append(at), up.set())
        await server.serve()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert up.wait(30)
    assert server is not None
    try:
        yield said[0]
    finally:
        loop.call_soon_threadsafe(server.end)
        thread.join(30)
        loop.close()


@asynccontextmanager
async def client_of(opened, keys=(), bounds=None, speaker=None, sessions=4):
    app = make_app(speaker or opened.speaker, Sessions(opened.company, most=sessions), Keys(keys), bounds)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60) as client,
    ):
        yield client
