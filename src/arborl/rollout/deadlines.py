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

from arborl.errors import EpisodeError, EpisodeOver, boundary

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
    began = time.perf_counter()
    value = await _across(where, seconds, function, *args, **more)
    if seconds is not None and time.perf_counter() - began > seconds:
        raise EpisodeError(where, TimeoutError(f"took longer than {seconds:g} s, and nothing else ran meanwhile"))
    return value


async def _across(where: str, seconds: float | None, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    try:
        begun = function(*args, **more)
        if not isinstance(begun, CoroutineType):
            waits: Awaitable[Any] | None = begun if isawaitable(begun) else None
            if waits is None:
                return begun
        else:
            done, value = _first(begun)
            if done:
                return value
            waits = Resumed(begun, value)
    except (EpisodeError, EpisodeOver, KeyboardInterrupt):
        raise
    except BaseException as error:  # `sys.exit` too; and before the first wait nobody but itself can have cancelled it
        raise EpisodeError(where, error) from error
    async with boundary(where, seconds):
        try:
            return await waits
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # it cancelled itself: that is a failure of its own
                raise EpisodeError(where, error) from error
            raise


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
