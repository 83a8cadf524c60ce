"""What a tool is: a function, what the model is told about it, and a `run` that answers whatever the model wrote."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, overload

from arborl.errors import EpisodeError, boundary
from arborl.tools.arguments import ArgumentError, Arguments
from arborl.tools.docstring import read_docstring
from arborl.types import ToolResult, ToolSpec


class Tool:
    """A function a model may call. Made by `@tool`; still callable as the function.

    Args:
        function: plain or async. A plain one runs in a thread of its own, so a slow one holds up nobody.
        name: what the model calls it; the function's name by default.
        description: what the model is told; the docstring's opening by default.
        timeout: seconds before the model is told that it took too long. A thread cannot be stopped: what a plain
            function does after that is lost, not undone.
        max_chars: longer answers are cut, visibly.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
        timeout: float = 10.0,
        max_chars: int = 2000,
    ):
        if timeout <= 0:
            raise ValueError(f"timeout={timeout}: give seconds above 0")
        if max_chars < 1:
            raise ValueError(f"max_chars={max_chars}: give at least 1")
        self.function, self.timeout, self.max_chars = function, timeout, max_chars
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        text = read_docstring(inspect.getdoc(function))
        self._arguments = Arguments(self.name, function, text.arguments)
        self.spec = ToolSpec(self.name, description or text.description, self._arguments.schema)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    async def run(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer one call. Wrong arguments, exceptions and timeouts are answers too."""
        start = time.perf_counter()
        try:
            checked = self._arguments.check(arguments)
            async with boundary(f"tool {self.name!r}", self.timeout):
                content, kind = as_text(await self._call(checked)), "ok"
        except ArgumentError as error:
            content, kind = str(error), "arguments"
        except EpisodeError as error:
            content = f"{self.name}: {type(error.cause).__name__}: {error.cause}"
            kind = "timeout" if error.kind == "timeout" else "exception"
        return ToolResult(cut(content, self.max_chars), kind == "ok", kind, time.perf_counter() - start)

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        return await in_thread(functools.partial(self.function, **arguments))


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout: float = 10.0, max_chars: int = 2000
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Describe a function to a model: types from its signature, words from its docstring. Registers nothing.

    Example:
        @tool
        def weather(city: str, days: int = 1) -> str:
            '''Forecast the weather.

            Args:
                city: name of the city, in English.
                days: how far ahead.
            '''

        @tool(timeout=60, max_chars=500)
        async def search(query: str) -> list[str]: ...
    """
    return Tool(function, **options) if function is not None else functools.partial(Tool, **options)


def as_text(value: Any) -> str:
    """What the model reads: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, and then a word on how many are gone."""
    return text if len(text) <= limit else f"{text[:limit]}… [cut: {len(text) - limit:,} more characters]"


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

    threading.Thread(target=work, name=f"arborl-{function}", daemon=True).start()
    value, error = await outcome
    if error is not None and not isinstance(error, Exception):  # SystemExit ends the thread it was raised in, no more
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if error is not None:
        raise error
    return value
