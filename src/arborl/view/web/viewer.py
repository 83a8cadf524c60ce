"""The application behind a socket of this machine, until a signal."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from arborl.errors import ConfigError
from arborl.tools.gate import listening
from arborl.view.web.app import make_app

HOST = "127.0.0.1"
"""Nobody else is let in: episodes are shown to whoever asks."""


class Viewer(uvicorn.Server):
    """Shows the runs of a folder.

    Args:
        root: the folder.
        port: 0 for any that is free.
        said: told the address once it can be asked.
    """

    def __init__(self, root: Path, port: int, said: Callable[[str], object] = lambda at: None):
        super().__init__(listening(make_app(root), HOST, port, 1))
        self.said = said

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.said(f"http://{HOST}:{self.servers[0].sockets[0].getsockname()[1]}")


def free_port(port: int, only: bool) -> int:
    """This port, or, unless it must be it, any where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not only:
                return 0
            raise ConfigError(f"--port {port}: {error.strerror}. Write another one, or 0 for any.") from error
    return port
