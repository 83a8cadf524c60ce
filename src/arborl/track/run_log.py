"""`run.log`: all that a run said on the console, and more, with times and levels; a resumed run appends.

What reaches the terminal does not change: the file takes our lines from `info` on (`debug` where that is asked for),
and of other libraries warnings, while handlers elsewhere get what they would have got without it.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import shlex
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from arborl.config.secrets import SecretRedactor
from arborl.errors import ArborError, disk_errors
from arborl.track.logs import OURS, debugging

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
LIBRARIES = ("arborl", "torch", "transformers", "numpy")
WIDTH = 120


class RunLog:
    """Holds the file open. While any is open, our own log lines from its level on are made and written there.

    Args:
        path: the file; what it has stays.
        config: the run's, in plain values: its secrets, and those of the environment, are kept out.

    Example:
        with RunLog(folder / "run.log") as log:
            log.say("step 1/30  reward 0.4")
    """

    def __init__(self, path: Path, config: Any = None):
        self.path, self.veil = path, SecretRedactor(config)
        self.level = logging.DEBUG if debugging() or OURS.getEffectiveLevel() <= logging.DEBUG else logging.INFO
        self.formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S")
        self.formatter.converter = time.gmtime
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        with disk_errors(self.path):
            self.file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        _split.add(self)
        self.say(_versions())
        self.say(f"command: {shlex.join(sys.argv)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ArborError):
            self.say(f"ended: {type(error).__name__}: {error}", logging.ERROR)
        elif isinstance(error, Exception):
            self.write(_record(f"ended: {type(error).__name__}: {error}", logging.ERROR, error))
        elif error is not None:
            self.say(f"stopped: {type(error).__name__}", logging.WARNING)
        _split.remove(self)
        self.file.close()

    def say(self, text: str, level: int = logging.INFO) -> None:
        """A line, or several, that the console shows too, or would."""
        for line in text.splitlines():
            self.write(_record(line, level))

    def show(self, shown: Any) -> None:
        """What `rich` draws on a terminal, as plain text."""
        plain = io.StringIO()
        Console(file=plain, width=WIDTH, color_system=None).print(
            shown, markup=False, highlight=False, soft_wrap=isinstance(shown, str)
        )
        self.say("\n".join(line.rstrip() for line in plain.getvalue().splitlines() if line.strip()))

    def write(self, record: logging.LogRecord) -> None:
        """Write one record. A disk that is full costs the line, and not the run: its own files will say so."""
        if record.levelno < self.level:
            return
        text = self.veil(self.formatter.format(record))
        with self.lock:
            try:
                self.file.write(text + "\n")
                self.file.flush()
            except (OSError, ValueError):  # full, or closed in this moment
                pass


class _Split(logging.Handler):
    """Stands at our own logger while a log is open, and at the root for others; passes on what would have gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[RunLog] = []
        self.others = _Others(self)
        self.before = logging.NOTSET
        """The level of our logger without us."""
        self.guard = threading.RLock()

    def add(self, log: RunLog) -> None:
        with self.guard:
            self.logs.append(log)
            if len(self.logs) == 1:
                self.before = OURS.level
                self.shown = OURS.getEffectiveLevel()
                OURS.propagate = False
                OURS.addHandler(self)
                self.bare = not logging.root.handlers
                if self.bare and logging.lastResort is not None:  # with a handler there, it would fall silent
                    logging.root.addHandler(logging.lastResort)
                logging.root.addHandler(self.others)
                self.captures = getattr(logging, "_warnings_showwarning", None) is None
                if self.captures:
                    logging.captureWarnings(True)
            OURS.setLevel(min(log.level for log in self.logs))

    def remove(self, log: RunLog) -> None:
        with self.guard:
            self.logs.remove(log)
            if self.logs:
                return
            if self.captures:
                logging.captureWarnings(False)
            logging.root.removeHandler(self.others)
            if self.bare and logging.lastResort is not None:
                logging.root.removeHandler(logging.lastResort)
            OURS.removeHandler(self)
            OURS.propagate = True
            OURS.setLevel(self.before)

    def handle(self, record: logging.LogRecord) -> bool:
        for log in list(self.logs):
            log.write(record)
        if record.levelno >= self.shown:
            logging.root.callHandlers(record)
        return True


class _Others(logging.Handler):
    """At the root: what other libraries warn of."""

    def __init__(self, split: _Split):
        super().__init__(logging.WARNING)
        self.split = split

    def handle(self, record: logging.LogRecord) -> bool:
        ours = record.name == OURS.name or record.name.startswith(f"{OURS.name}.")
        if not ours and record.levelno >= self.level:
            for log in list(self.split.logs):
                log.write(record)
        return True


_split = _Split()


def _record(text: str, level: int, error: BaseException | None = None) -> logging.LogRecord:
    trace = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("arborl", level, "", 0, "%s", (text,), trace)


def _versions() -> str:
    known = []
    for name in LIBRARIES:
        try:
            known.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{', '.join(known)}; python {platform.python_version()}, {platform.platform()}, process {os.getpid()}"
