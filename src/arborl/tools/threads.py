"""Plain functions beside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_thread(function: Callable[[], Any]) -> Any:
    """`function()` in a daemon thread of its own.

    Not in asyncio's pool: a few functions that never return would fill it, and leaving the event loop waits for it.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not outcome.done():  # cancelled: the caller stopped waiting
            outcome.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    name = getattr(getattr(function, "func", function), "__name__", "tool")  # never its arguments: they may be long
    threading.Thread(target=work, name=f"arborl-{name}", daemon=True).start()
    value, error = await outcome
    if error is not None and not isinstance(error, Exception):  # SystemExit ends the thread it was raised in, no more
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if error is not None:
        raise error
    return value
