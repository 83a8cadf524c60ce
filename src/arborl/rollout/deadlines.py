"""Calls of environments and engines under a deadline, and a watchdog for code that blocks the event loop.

Most calls return without waiting. The coroutine is driven by hand up to its first wait; only a coroutine that waits
gets a timer.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from inspect import isawaitable
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any, ClassVar

from arborl.errors import EpisodeError, EpisodeLimitReached, boundary
from arborl.rewards.reward import Rewards

log = logging.getLogger(__name__)

ENGINE = "engine"
POLL_SECONDS = 0.5
BLOCKED_SECONDS = 2.0
"""Time without progress of the event loop before the watchdog warns."""


async def call_with_deadline(
    where: str, seconds: float | None, function: Callable[..., Any], *args: Any, **more: Any
) -> Any:
    """The result of `function(*args)`, awaited if it is awaitable. Errors are attributed to `where`, as in `boundary`.
    A blocking call cannot be interrupted from its own event loop. It fails after it returns, as it would in a thread:
    the result of an episode does not depend on where its environment runs."""
    if seconds is None:
        return await call_without_deadline(where, function, *args, **more)
    start = time.perf_counter()
    try:
        value = function(*args, **more)
        pending: Awaitable[Any] | None = None
        if isinstance(value, CoroutineType):
            is_done, first = _run_to_first_wait(value)
            value, pending = (first, None) if is_done else (None, ResumedCoroutine(value, first))
        elif isawaitable(value):
            pending = value
    except (EpisodeError, EpisodeLimitReached, KeyboardInterrupt):
        raise
    except BaseException as error:  # `sys.exit` too; before the first wait only the callee itself can cancel
        raise EpisodeError(where, error) from error
    if pending is not None:
        async with boundary(where, seconds):
            value = await call_without_deadline(where, lambda: pending)
    if time.perf_counter() - start > seconds:
        raise EpisodeError(where, TimeoutError(f"took longer than {seconds:g} s and blocked the event loop"))
    return value


async def call_without_deadline(where: str, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """The same without a timeout."""
    try:
        value = function(*args, **more)
        return await value if isawaitable(value) else value
    except (EpisodeError, EpisodeLimitReached, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or not task.cancelling():  # the callee cancelled itself: a failure
            raise EpisodeError(where, error) from error
        error.add_note(where)  # an outer deadline names this place
        raise
    except BaseException as error:
        raise EpisodeError(where, error) from error


def _run_to_first_wait(coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Whether the coroutine is done, and its result or the object that it waits for."""
    try:
        return False, coroutine.send(None)
    except StopIteration as done:
        return True, done.value


class ResumedCoroutine:
    """A coroutine that was run up to its first wait, to be awaited from there."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits: Any):
        self.coroutine, self.waits = coroutine, waits

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            while True:
                try:
                    sent = yield self.waits
                except BaseException as error:
                    self.waits = self.coroutine.throw(error)
                else:
                    self.waits = self.coroutine.send(sent)
        except StopIteration as done:
            return done.value


PACKAGE_DIR = str(Path(__file__).parents[1])
LIBRARY_PATHS = ("<", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
EVENT_LOOP_FILES = ("asyncio/events.py", "asyncio/base_events.py", "asyncio/runners.py")
CALLING_CODE = (call_with_deadline.__code__, call_without_deadline.__code__, Rewards._compute.__code__)
"""Functions whose local variable `where` names the callee."""


class EventLoopWatchdog:
    """Warns once for each place in the code that blocks the event loop. It runs in a thread. Code in the event loop
    (agents, async tools and rewards, environments with `blocking = False`) that calls `time.sleep` stops every episode,
    every deadline and Ctrl-C. It cannot be interrupted, but it can be named."""

    reported: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self.is_over, self.is_alive = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, name="arborl-watchdog", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.is_over.set()

    def _watch(self) -> None:
        while not self.is_over.is_set():
            self.is_alive.clear()
            try:
                self.loop.call_soon_threadsafe(self.is_alive.set)
            except RuntimeError:  # the loop is closed
                return
            seconds = 0.0
            while not self.is_over.wait(POLL_SECONDS) and not self.is_alive.is_set():
                seconds += POLL_SECONDS
                if seconds >= BLOCKED_SECONDS:
                    self._warn(seconds)

    def _warn(self, seconds: float) -> None:
        place = blocking_code(sys._current_frames().get(self.thread))
        if place is None or place in self.reported:
            return
        self.reported.add(place)
        log.warning(
            "%s has blocked the event loop for %.1f s: no other episode, no deadline and no Ctrl-C runs meanwhile. "
            "Use `await` for what waits there. Environments without `blocking = False`, and tools and rewards that are "
            "plain functions, run in threads and may block.",
            place,
            seconds,
        )


def blocking_code(frame: FrameType | None) -> str | None:
    """The user's code that a thread runs: its innermost line outside this package and the libraries, and the
    environment or reward that it was called for. None if the innermost line is of this package."""
    line = inside = None
    while frame is not None and not frame.f_code.co_filename.endswith(EVENT_LOOP_FILES):
        code = frame.f_code
        if code in CALLING_CODE:
            where = frame.f_locals["where"]
            return None if where == ENGINE else f"{where}{f' ({line})' if line else ''}"
        if line is inside is None and not code.co_filename.startswith(LIBRARY_PATHS):
            place = f"{code.co_filename}, line {frame.f_lineno}, in {code.co_name}"
            line, inside = (None, place) if code.co_filename.startswith(PACKAGE_DIR) else (place, None)
        frame = frame.f_back
    return line
