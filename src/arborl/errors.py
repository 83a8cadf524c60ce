"""Error types, deadlines, and conversion of errors.

Four families. `ConfigError` ends a run before it starts; its message states where, what, and what to write instead.
`RunStopped` ends a run that cannot continue. `EpisodeError` fails one episode: `boundary()` attributes the error to a
component, and the runner converts it to a `Failure`. All other exceptions are defects and propagate.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any


class ArborError(Exception):
    """Base class of all errors of Arbor."""


class ConfigError(ArborError):
    """The configuration is invalid; the run cannot start."""


class UnknownPartError(ConfigError):
    """A part has an unknown name."""


class RunStopped(ArborError):
    """The run cannot continue; the message states why and what to do."""


class AlarmStopped(RunStopped):
    """An alarm of the diagnosis holds (`trainer.on_alarm`): the run stops, or rolls back and restarts.

    `alarm` is a `diagnosis.alarms.Alarm`; `restarts`, whether the run rolls back; `message`, for the user.
    """

    def __init__(self, alarm: Any):
        super().__init__(str(alarm))
        self.alarm, self.restarts, self.message = alarm, False, f"Stopped by the alarm {alarm}."

    def __str__(self) -> str:
        return self.message


class LearnerRankLost(RunStopped):
    """A rank of the learner is lost, and with it all updates since the last checkpoint.

    `what` states which rank and how; `again`, whether this process can restart the ranks.
    """

    def __init__(self, what: str, again: bool = False):
        super().__init__(what)
        self.what, self.again, self.counted = what, again, False
        self.since = ""
        """Why the run does not resume automatically, as the end of a clause."""

    def __str__(self) -> str:
        if self.counted and self.again:
            return f"{self.what}: all ranks are restarted"
        return (
            f"{self.what}: the run has stopped{self.since}. Resume from its last checkpoint with arborl train --resume "
            "latest."
        )


class DiskWriteError(ConfigError):
    """A file cannot be written. Existing files are unchanged."""


class EpisodeLimitReached(ArborError):
    """A limit ended the episode, which is not a failure. `stop` is a value of `arborl.types.StopReason`."""

    stop = "done"


class ContextFull(EpisodeLimitReached):
    """The next prompt leaves no room for a completion."""

    stop = "context_full"


class MaxTurns(EpisodeLimitReached):
    """The agent reached `max_turns`."""

    stop = "max_turns"


class EngineError(ArborError):
    """The engine rejected or lost a request."""


class SchemaError(EngineError):
    """A request's JSON schema is invalid or not supported, or no token continues the text under it."""


class EpisodeError(ArborError):
    """Fails one episode. `where` names the component; the cause is chained."""

    def __init__(self, where: str, cause: BaseException):
        super().__init__(f"{where}: {type(cause).__name__}: {cause}")
        self.where = where
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:
        return EpisodeError, (self.where, self.cause)

    @property
    def kind(self) -> str:
        return "timeout" if isinstance(self.cause, TimeoutError) else type(self.cause).__name__


class boundary:
    """Attribute errors inside to the component `where`; `seconds` is a deadline.

    `SystemExit` of a component is its failure; `KeyboardInterrupt` propagates. Time inside `paused_deadlines()` does
    not count. A class is faster than a generator; every model call and environment step uses one.
    """

    __slots__ = ("left", "limit", "loop", "outer", "seconds", "waiting", "where")

    def __init__(self, where: str, seconds: float | None = None):
        self.where, self.seconds = where, seconds
        self.limit = None if seconds is None else asyncio.timeout(seconds)
        self.waiting, self.left = 0, 0.0

    async def __aenter__(self) -> None:
        if self.limit is not None:
            await self.limit.__aenter__()
            self.loop, self.outer = asyncio.get_running_loop(), _clock.get()
            _clock.set(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.limit is not None:
            _clock.set(self.outer)
            try:
                await self.limit.__aexit__(kind, error, trace)
            except TimeoutError as expired:
                component = getattr(expired.__cause__, "__notes__", [self.where])[0]
                whose = "" if component == self.where else f"{self.where} "
                raise EpisodeError(component, TimeoutError(f"{whose}took longer than {self.seconds:g} s")) from expired
        if isinstance(error, asyncio.CancelledError):
            if self.where not in getattr(error, "__notes__", ()):
                error.add_note(self.where)  # for the message of an outer deadline
        elif isinstance(error, Exception | SystemExit) and not isinstance(error, EpisodeError | EpisodeLimitReached):
            raise EpisodeError(self.where, error) from error  # those two are attributed already, or not a failure

    def stop(self) -> None:
        """Pause the deadline; each call needs a call of `start`."""
        self.waiting += 1
        when = self.limit.when() if self.limit is not None else None
        if self.waiting == 1 and self.limit is not None and when is not None:
            self.left = when - self.loop.time()
            with suppress(RuntimeError):  # it has expired
                self.limit.reschedule(None)

    def start(self) -> None:
        """Resume the deadline."""
        self.waiting -= 1
        if self.waiting == 0 and self.limit is not None:
            with suppress(RuntimeError):  # it is over
                self.limit.reschedule(self.loop.time() + self.left)


_clock: ContextVar[boundary | None] = ContextVar("clock", default=None)
"""The innermost boundary with a deadline; its `outer` is the next."""


def current_deadline() -> tuple[str, float] | None:
    """Component and seconds of the innermost `boundary` with a deadline."""
    clock = _clock.get()
    return None if clock is None or clock.seconds is None else (clock.where, clock.seconds)


class paused_deadlines:
    """Pause the deadlines of all surrounding boundaries, while a call waits in a queue.

    A deadline is paused while at least one call inside it waits. The call at the front of the queue must have its own
    deadline.
    """

    __slots__ = ("stopped",)

    def __enter__(self) -> None:
        self.stopped: list[boundary] = []
        clock, loop = _clock.get(), asyncio.get_running_loop()
        while clock is not None:
            if clock.loop is loop:  # contexts are copied into threads, whose loops have their own deadlines
                clock.stop()
                self.stopped.append(clock)
            clock = clock.outer

    def __exit__(self, *_: object) -> None:
        for clock in self.stopped:
            clock.start()


@contextmanager
def disk_errors(path: object) -> Iterator[None]:
    """Convert errors of the disk to `DiskWriteError`."""
    try:
        yield
    except Exception as error:
        reason = disk_error_reason(error)
        if reason is None or isinstance(error, DiskWriteError):
            raise
        raise DiskWriteError(
            f"{path}: cannot be written: {reason}. Free space or write another folder; existing files are unchanged."
        ) from error


def disk_error_reason(error: BaseException) -> str | None:
    """The message of the operating system, if it caused the error; libraries wrap it."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors
        return os.strerror(int(match[1]))
    return "the file could not be written completely" if "inline_container.cc" in str(error) else None  # torch.save


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=5, cutoff=0.5)
    swapped = [one for one in near if sorted(one) == sorted(name)]  # the same letters in another order: gpro, grpo
    return f" Did you mean {(swapped or near)[0]!r}?" if near else ""


def printable(text: str) -> str:
    """The text with control characters and surrogates escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
