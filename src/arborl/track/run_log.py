"""Log lines: on the terminal (`--log-level`, `ARBORL_DEBUG`) and in `run.log`.

`run.log` gets the console's lines, our log records from `info` on (`debug` if enabled) and warnings of other libraries.
The terminal output does not change. A resumed run appends.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from arborl.config.secrets import SecretRedactor
from arborl.errors import ArborError, ConfigError, did_you_mean, disk_errors

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
LIBRARIES = ("arborl", "torch", "transformers", "numpy")
WIDTH = 120
LEVELS = ("debug", "info", "warning", "error")
OURS = logging.getLogger("arborl")


def debugging() -> bool:
    """Whether `ARBORL_DEBUG` is set: level `debug`, and tracebacks instead of one-line errors. `STATESET_DEBUG` is the
    same variable in the StateSet guide."""
    values = (os.environ.get(name, "0").lower() for name in ("ARBORL_DEBUG", "STATESET_DEBUG"))
    return any(value not in ("", "0", "false", "no") for value in values)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a live display replaces for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_stderr_handler = StderrHandler()


def show_level(name: str) -> None:
    """Print our log records of this level and above on standard error; of other libraries, warnings and above."""
    if name not in LEVELS:
        raise ConfigError(f"--log-level {name}: no such level.{did_you_mean(name, LEVELS)} Write {', '.join(LEVELS)}.")
    level = getattr(logging, name.upper())
    OURS.setLevel(level)
    _stderr_handler.setLevel(level)
    if _stderr_handler not in logging.root.handlers:
        logging.root.addHandler(_stderr_handler)


@contextmanager
def logs_above(live: Live, console: Console) -> Iterator[None]:
    """Run the display; handlers that write to the terminal write above it.

    A library may hold the original `sys.stderr`, so each handler gets the display's stream for that time.
    """
    terminal = (sys.stdout, sys.stderr)
    writers = [handler for handler in _stream_handlers() if handler.stream in terminal]
    extra = None
    if not any(handler in writers for handler in logging.root.handlers):
        extra = RichHandler(console=console, show_path=False, markup=False, highlighter=None)
    with live:
        before = [(handler, handler.setStream(sys.stderr)) for handler in writers]
        if extra:
            logging.root.addHandler(extra)
        try:
            yield
        finally:
            if extra:
                logging.root.removeHandler(extra)
            for handler, stream in before:
                if stream is not None:
                    handler.setStream(stream)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for one in loggers if isinstance(one, logging.Logger) for handler in one.handlers]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]


class _Collector(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]):
        super().__init__(logging.WARNING)
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def recorded_warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect our warnings, which are shown as usual, for a `run.log` that does not exist yet."""
    records: list[logging.LogRecord] = []
    handler = _Collector(records)
    last_resort = logging.lastResort if not logging.root.handlers else None  # our handler would silence it
    OURS.addHandler(handler)
    if last_resort is not None:
        logging.root.addHandler(last_resort)
    try:
        yield records
    finally:
        OURS.removeHandler(handler)
        if last_resort is not None:
            logging.root.removeHandler(last_resort)


class RunLog:
    """The open file; our log records from its level on are written to it. Secrets of `config` are masked.

    Args:
        path: of the file.
        config: of the run.
        earlier: records from before the file was opened.
    """

    def __init__(self, path: Path, config: Any = None, earlier: Sequence[logging.LogRecord] = ()):
        self.path, self.redact, self.earlier = path, SecretRedactor(config), earlier
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
        for record in self.earlier:
            self.write(record)
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
        for line in text.splitlines():
            self.write(_record(line, level))

    def show(self, shown: Any) -> None:
        """Write a rich renderable as plain text."""
        plain = io.StringIO()
        Console(file=plain, width=WIDTH, color_system=None).print(
            shown, markup=False, highlight=False, soft_wrap=isinstance(shown, str)
        )
        self.say("\n".join(line.rstrip() for line in plain.getvalue().splitlines() if line.strip()))

    def write(self, record: logging.LogRecord) -> None:
        """Write one record; on a full disk the line is lost."""
        if record.levelno < self.level:
            return
        text = self.redact(self.formatter.format(record))
        with self.lock:
            try:
                self.file.write(text + "\n")
                self.file.flush()
            except (OSError, ValueError):  # full disk, or closed file
                pass


class _Split(logging.Handler):
    """Handler of our logger while a log is open; forwards records to the handlers that would have got them."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[RunLog] = []
        self.others = _Others(self)
        self.before = logging.NOTSET
        """The logger's level before."""
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
                if self.bare and logging.lastResort is not None:  # otherwise our handler would silence it
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
    """Handler of the root logger for warnings of other libraries."""

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
