"""Calls that cross the border to somebody else's code: an environment, an engine.

Most of them answer without waiting for anything. These take a short way: the coroutine is run by hand up to where it
would first wait, and only one that does wait gets a timer and a place in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from inspect import isawaitable
from types import CoroutineType
from typing import Any

from arborl.errors import EpisodeError, EpisodeLimitReached, boundary

ENGINE = "engine"
"""Who is called when the model is."""


async def across(where: str, seconds: float | None, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What `function(*args)` returns, awaited where it can be; whatever fails belongs to `where`, as in `boundary`.

    A call that blocks cannot be stopped from the event loop that it holds. It has failed all the same when it took too
    long, as it would have in a thread: what an episode comes to does not depend on where its environment runs.

    Args:
        where: who is called.
        seconds: what it may take.
        function: plain or async.
        args, more: its arguments.
    """
    if seconds is None:
        return await untimed(where, function, *args, **more)
    began = time.perf_counter()
    try:
        value = function(*args, **more)
        waits: Awaitable[Any] | None = None
        if isinstance(value, CoroutineType):
            done, first = _first(value)
            value, waits = (first, None) if done else (None, Resumed(value, first))
        elif isawaitable(value):
            waits = value
    except (EpisodeError, EpisodeLimitReached, KeyboardInterrupt):
        raise
    except BaseException as error:  # `sys.exit` too; and before the first wait nobody but itself can have cancelled it
        raise EpisodeError(where, error) from error
    if waits is not None:
        async with boundary(where, seconds):
            value = await untimed(where, lambda: waits)
    if time.perf_counter() - began > seconds:
        raise EpisodeError(where, TimeoutError(f"took longer than {seconds:g} s, and nothing else ran meanwhile"))
    return value


async def untimed(where: str, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """The same without a deadline."""
    try:
        value = function(*args, **more)
        return await value if isawaitable(value) else value
    except (EpisodeError, EpisodeLimitReached, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or not task.cancelling():  # it cancelled itself: that is a failure of its own
            raise EpisodeError(where, error) from error
        error.add_note(where)  # so that an outer deadline can say where it struck
        raise
    except BaseException as error:
        raise EpisodeError(where, error) from error


def _first(coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Run it up to its first wait: whether it is done, and what it returned or waits for."""
    try:
        return False, coroutine.send(None)
    except StopIteration as done:
        return True, done.value


class Resumed:
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
