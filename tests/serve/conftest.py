"""One server for all tests of a process: the embedded model behind a real socket."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("uvicorn", reason="the extra 'serve'")

from arborl.serve.app import Bounds, make_app
from arborl.serve.keys import Keys
from arborl.serve.opened import Opened, open_model
from arborl.serve.run import Server
from arborl.serve.sessions import Sessions

SUM = Path(__file__).with_name("adding.py")


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


@pytest.fixture(scope="session")
def opened():
    made = open_model("seedling", ["agent=tool", "tools=[calculator]"])
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def address(opened):
    with running(opened) as at:
        yield at
