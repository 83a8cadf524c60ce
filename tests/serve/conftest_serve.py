"""The application without a socket: for what needs no streaming."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx

from arborl.serve.app import make_app
from arborl.serve.keys import Keys
from arborl.serve.sessions import Sessions


@asynccontextmanager
async def client_of(opened, keys=(), bounds=None, speaker=None, sessions=4):
    app = make_app(speaker or opened.speaker, Sessions(opened.company, most=sessions), Keys(keys), bounds)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=60) as client,
    ):
        yield client
