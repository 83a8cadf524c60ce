"""Keeps log lines out of a live display: while it is up, they are printed above it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler


@contextmanager
def logs_above(live: Live, console: Console) -> Iterator[None]:
    """Run the display; every handler that writes to the terminal writes above it until the end.

    A library may have taken hold of `sys.stderr` long ago, so redirecting that name is not enough: its handlers are
    given the display's stream, and their own back afterwards.
    """
    terminal = (sys.stdout, sys.stderr)
    writers = [handler for handler in _stream_handlers() if handler.stream in terminal]
    own = None if any(handler in writers for handler in logging.root.handlers) else _handler(console)
    with live:
        before = [(handler, handler.setStream(sys.stderr)) for handler in writers]
        if own:
            logging.root.addHandler(own)
        try:
            yield
        finally:
            if own:
                logging.root.removeHandler(own)
            for handler, stream in before:
                if stream is not None:
                    handler.setStream(stream)


def _handler(console: Console) -> RichHandler:
    return RichHandler(console=console, show_path=False, markup=False, highlighter=None)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    known = [
        logging.root,
        *(made for made in logging.root.manager.loggerDict.values() if isinstance(made, logging.Logger)),
    ]
    return [handler for logger in known for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
