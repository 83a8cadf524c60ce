"""Log lines on the terminal: how many of them (`--log-level`, `ARBORL_DEBUG`), and kept out of a live display."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from arborl.errors import ConfigError, did_you_mean

LEVELS = ("debug", "info", "warning", "error")
OURS = logging.getLogger("arborl")


def debugging() -> bool:
    """Whether `ARBORL_DEBUG` asks for all there is: the level `debug`, and tracebacks instead of one-line errors."""
    return os.environ.get("ARBORL_DEBUG", "0").lower() not in ("", "0", "false", "no")


class OnStderr(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at that moment: a live display takes its place for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_shown = OnStderr()


def show_level(name: str) -> None:
    """Show our log lines of this level and above on standard error; of other libraries, warnings and above."""
    if name not in LEVELS:
        raise ConfigError(f"--log-level {name}: no such level.{did_you_mean(name, LEVELS)} Write {', '.join(LEVELS)}.")
    level = getattr(logging, name.upper())
    OURS.setLevel(level)
    _shown.setLevel(level)
    if _shown not in logging.root.handlers:
        logging.root.addHandler(_shown)


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
