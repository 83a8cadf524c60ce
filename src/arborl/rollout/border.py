"""Calls that cross the border to somebody else's code: an environment, an engine.

Most of them answer without waiting for anything. These take a short way: the coroutine is run by hand up to where it
would first wait, and only one that does wait gets a timer and a place in the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from inspect import isawaitable
from types import CoroutineType
from typing import Any

from arborl.errors import EpisodeError, EpisodeOver, boundary

HELD = 0.5
"""Seconds after which a call that did not wait is said to hold the event loop."""


async def across(
    where: str,
    seconds: float | None,
    function: Callable[..., Any],
    *args: Any,
    held: Callable[[float], None] | None = None,
    **more: Any,
) -> Any:
    """What `function(*args)` returns, awaited where it can be; whatever fails belongs to `where`, as in `boundary`.

    Args:
        where: who is called.
        seconds: what it may take, once it waits.
        function: plain or async.
        args, more: its arguments.
        held: told how long the call kept everybody from running, if it was long.
    """
    began = time.perf_counter()
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
    except (EpisodeError, EpisodeOver):
        raise
    except Exception as error:
        raise EpisodeError(where, error) from error
    finally:
        if held is not None and (took := time.perf_counter() - began) > HELD:
            held(took)
    async with boundary(where, seconds):
        return await waits


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
