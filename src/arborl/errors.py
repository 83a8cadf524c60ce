"""What can go wrong, and where it is caught.

Four families. `ConfigError` ends a run before anything starts, with one line that says where, what and what to write
instead. `RunStopped` ends one that has started and cannot work. An `EpisodeError` costs one episode: `boundary()`
attributes it, once, to the border it crossed, and the runner turns it into a `Failure`. Everything else is a defect and
propagates.
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
    """Root of everything Arbor raises on purpose."""


class ConfigError(ArborError):
    """The run as described cannot start."""


class UnknownPartError(ConfigError):
    """A part was asked for by a name nobody has."""


class RunStopped(ArborError):
    """The run goes on no more because there is no point in it; the message says why and what to do."""


class LearnerRankLost(RunStopped):
    """A rank of the learner is gone: what the run has learned since its last checkpoint is gone with it.

    Args:
        what: who, and how: `learner rank 1 of 2 was killed by signal 9`.
        again: whether whoever runs this can start the ranks anew.
    """

    def __init__(self, what: str, again: bool = False):
        super().__init__(what)
        self.what, self.again, self.counted = what, again, False
        self.since = ""
        """Why the run does not go on by itself, where there is more to say."""

    def __str__(self) -> str:
        if self.counted and self.again:
            return f"{self.what}: all ranks are started anew"
        return (
            f"{self.what}: the run has stopped{self.since}. Go on from its last checkpoint with arborl train --resume "
            "latest."
        )


class DiskWriteError(ConfigError):
    """The disk is full, or the place is not ours to write. What was there before is as it was."""


class EpisodeLimitReached(ArborError):
    """A limit ended the episode from inside; it has not failed. `stop` is a value of `arborl.types.StopReason`."""

    stop = "done"


class ContextFull(EpisodeLimitReached):
    """The next prompt leaves no room to sample."""

    stop = "context_full"


class MaxTurns(EpisodeLimitReached):
    """The agent used up its turns."""

    stop = "max_turns"


class EngineError(ArborError):
    """The engine refused or lost one request."""


class EpisodeError(ArborError):
    """Costs one episode. `where` names the border that was crossed; the cause is chained."""

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
    """Whatever fails inside belongs to `where`; with `seconds`, so does taking longer than that.

    Somebody else's `sys.exit` is a failure of theirs too; `KeyboardInterrupt` is the user's and goes through. Time
    spent in `paused_deadlines()` is no part of it.

    A class and no generator: every model call and environment step passes one.

    Example:
        async with boundary("tool 'search'", seconds=5):
            content = await tool(query="…")
        # -> EpisodeError: tool 'search': TimeoutError: took longer than 5 s
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
                struck = getattr(expired.__cause__, "__notes__", [self.where])[0]
                whose = "" if struck == self.where else f"{self.where} "
                raise EpisodeError(struck, TimeoutError(f"{whose}took longer than {self.seconds:g} s")) from expired
        if isinstance(error, asyncio.CancelledError):
            if self.where not in getattr(error, "__notes__", ()):
                error.add_note(self.where)  # so that an outer deadline can say where it struck
        elif isinstance(error, Exception | SystemExit) and not isinstance(error, EpisodeError | EpisodeLimitReached):
            raise EpisodeError(self.where, error) from error  # those two are attributed already, or no failure

    def stop(self) -> None:
        """Let the clock stand still; as often as it is stopped it must be started."""
        self.waiting += 1
        when = self.limit.when() if self.limit is not None else None
        if self.waiting == 1 and self.limit is not None and when is not None:
            self.left = when - self.loop.time()
            with suppress(RuntimeError):  # it has struck
                self.limit.reschedule(None)

    def start(self) -> None:
        """Let the clock go on."""
        self.waiting -= 1
        if self.waiting == 0 and self.limit is not None:
            with suppress(RuntimeError):  # it is over
                self.limit.reschedule(self.loop.time() + self.left)


_clock: ContextVar[boundary | None] = ContextVar("clock", default=None)
"""The innermost boundary with a deadline; its `outer` is the next."""


def current_deadline() -> tuple[str, float] | None:
    """The innermost `boundary` with a deadline: whose it is, and how many seconds it allows."""
    clock = _clock.get()
    return None if clock is None or clock.seconds is None else (clock.where, clock.seconds)


class paused_deadlines:
    """Waiting for one's turn is nobody's fault: meanwhile the clocks of all boundaries around stand still.

    Of several waits under one boundary the longest counts, so a clock runs only while nothing in it waits. For queues
    that are sure to move on: whoever is at their front must have a deadline of its own.

    Example:
        with queued():
            await slots.take()
    """

    __slots__ = ("stopped",)

    def __enter__(self) -> None:
        self.stopped: list[boundary] = []
        clock, loop = _clock.get(), asyncio.get_running_loop()
        while clock is not None:
            if clock.loop is loop:  # a context is copied into threads too, and their loops have clocks of their own
                clock.stop()
                self.stopped.append(clock)
            clock = clock.outer

    def __exit__(self, *_: object) -> None:
        for clock in self.stopped:
            clock.start()


@contextmanager
def disk_errors(path: object) -> Iterator[None]:
    """What a disk refuses inside is one sentence: a full one must not look like a defect.

    Example:
        with writing(path):
            path.write_text("…")      # CannotWrite: runs/x/metrics.jsonl: cannot be written: No space left on device. …
    """
    try:
        yield
    except Exception as error:
        reason = disk_error_reason(error)
        if reason is None or isinstance(error, DiskWriteError):
            raise
        raise DiskWriteError(
            f"{path}: cannot be written: {reason}. Make room or give another folder; what was there is as it was."
        ) from error


def disk_error_reason(error: BaseException) -> str | None:
    """What the system said, where it was the system that refused; libraries wrap it in errors of their own."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if told := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors
        return os.strerror(int(told[1]))
    return "the file could not be written whole" if "inline_container.cc" in str(error) else None  # torch.save


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def printable(text: str) -> str:
    """The text with control characters and surrogates escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
