"""The application behind a socket, until a signal asks to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from arborl.serve.door import Load
from arborl.tools.remote.http_middleware import uvicorn_config


class Server(uvicorn.Server):
    """Stops in two steps: first it takes no more requests (they are told to come back, and may) and answers those that
    it has taken; then it closes its socket. A second signal ends it at once.

    Args:
        app: of `make_app`.
        host, port: where to listen.
        drain: seconds that requests have to end.
    """

    def __init__(self, app: FastAPI, host: str, port: int, drain: float = 60.0):
        super().__init__(uvicorn_config(app, host, port, 5, backlog=4096))
        self.load: Load = app.state.load
        self.drain = drain
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self.said: Callable[[str], None] = lambda at: None
        """Told the address once requests are taken; the port may have been left to the system."""

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)  # type: ignore[arg-type]
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.said(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.load.draining or self.loop is None:
            self.should_exit, self.force_exit = True, sig == signal.SIGINT
        else:
            self.load.draining = True
            self.loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Stop, once all that was taken is answered."""
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        await self.load.drained(self.drain)
        await asyncio.sleep(0.1)  # last bytes are on their way, and who connects now is told to come back
        self.should_exit = True
