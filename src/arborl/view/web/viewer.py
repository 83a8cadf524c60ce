"""The viewer's HTTP server on this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from arborl.errors import ConfigError
from arborl.tools.remote.http_middleware import uvicorn_config
from arborl.view.web.app import make_app

HOST = "127.0.0.1"
"""Local connections only: the viewer has no authentication."""


class Viewer(uvicorn.Server):
    """Serves the runs of a folder; `on_start` gets the address once the server accepts requests."""

    def __init__(self, root: Path, port: int, on_start: Callable[[str], object] = lambda at: None):
        super().__init__(uvicorn_config(make_app(root), HOST, port, 1))
        self.on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.on_start(f"http://{HOST}:{self.servers[0].sockets[0].getsockname()[1]}")


def free_port(port: int, only: bool) -> int:
    """The port; 0 (any) if it is in use and not required."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not only:
                return 0
            raise ConfigError(f"--port {port}: {error.strerror}. Write another port, or 0 for any.") from error
    return port
