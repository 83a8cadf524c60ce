"""What a tool is: a function, what the model is told about it, and a `run` that answers whatever the model wrote."""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol, Self, overload

from pydantic.errors import PydanticUserError

from arborl.errors import EpisodeError, boundary
from arborl.tools.docstring import read_docstring
from arborl.tools.injection import Context, Filler, mark_of
from arborl.tools.output import cut
from arborl.tools.schema import ArgumentError, Arguments
from arborl.tools.threads import in_thread
from arborl.types import ToolResult, ToolSpec


class AnyTool(Protocol):
    """What a toolbox holds: a function of this process, or one that another process runs.

    `stateful` calls of one turn run in the order written, all others at once; a `terminal` call ends the episode.
    """

    name: str
    spec: ToolSpec
    stateful: bool
    terminal: bool

    async def run(self, arguments: Mapping[str, Any], context: Context | None = None) -> ToolResult:
        """Answer one call. What goes wrong with it is an answer too."""
        ...


class Limit(Protocol):
    """What a call waits for before it runs, such as `arborl.tools.RateLimit`."""

    async def acquire(self) -> Any: ...


class Tool:
    """A function a model may call. Made by `@tool`; still callable as the function.

    Args:
        function: plain or async, or a method. A plain one runs in a thread of its own, so a slow one holds up nobody.
        name: what the model calls it; the function's name by default.
        description: what the model is told; the docstring's opening by default.
        timeout: seconds before the model is told that it took too long. A thread cannot be stopped: what a plain
            function does after that is lost, not undone.
        max_tokens: longer answers are cut, visibly; counted by the model's tokenizer where there is one.
        max_chars: as `max_tokens`, in characters; whichever is reached first.
        stateful: its answer depends on earlier calls. Calls of one turn then run in the order written. A stateful
            method given by its class (`Notebook.note`) gets a fresh object an episode.
        terminal: a call that works ends the episode, and what it returns is the answer.
        limit: each call waits for `await limit.acquire()` first; the wait is no part of `timeout`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
        timeout: float = 10.0,
        max_tokens: int = 512,
        max_chars: int = 4000,
        stateful: bool = False,
        terminal: bool = False,
        limit: Limit | None = None,
    ):
        for key, value in (("timeout", timeout), ("max_tokens", max_tokens), ("max_chars", max_chars)):
            if value <= 0:
                raise ValueError(f"{key}={value}: give more than 0")
        self.function, self.timeout, self.limit = function, timeout, limit
        self.max_tokens, self.max_chars = max_tokens, max_chars
        self.stateful, self.terminal = stateful, terminal
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.sandboxed = False
        """It runs code in the sandbox; a run with such a tool says which isolation is in force."""
        self.owner: type | None = None
        """The class a method was defined in, until it is bound to an object."""
        text = read_docstring(inspect.getdoc(function))
        self._arguments, self._filler, self._method = describe(self.name, function, text.arguments)
        self.spec = ToolSpec(self.name, description or text.description, self._arguments.schema)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def __set_name__(self, owner: type, name: str) -> None:
        if self._method:
            self.owner = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """A method looked up on an object is a tool of that object."""
        if instance is None or self.owner is None:
            return self
        bound = object.__new__(type(self))
        bound.__dict__ = {**self.__dict__, "function": self.function.__get__(instance, owner), "owner": None}
        bound._method = False
        return bound

    @property
    def unbound(self) -> bool:
        """Whether it is a method that nothing says the object of."""
        return self._method and not (self.stateful and self.owner is not None)

    async def run(self, arguments: Mapping[str, Any], context: Context | None = None) -> ToolResult:
        """Answer one call. Wrong arguments, exceptions and timeouts are answers too.

        A state made without a `context` is closed with the call.
        """
        if context is None:
            async with Context() as once:
                return await self.run(arguments, once)
        start = time.perf_counter()
        function, filled = self._function(context), self._filler.fill(context)
        try:
            given = self._arguments.check(arguments)
            if self.limit is not None:
                await self.limit.acquire()
            async with boundary(f"tool {self.name!r}", self.timeout):
                content, kind = as_text(await self._call(function, given | filled)), "ok"
        except ArgumentError as error:
            content, kind = str(error), "arguments"
        except EpisodeError as error:
            content = f"{self.name}: {type(error.cause).__name__}: {error.cause}"
            kind = "timeout" if error.kind == "timeout" else "exception"
        kept = cut(content, self.max_chars, self.max_tokens, context.tokenizer)
        return ToolResult(kept, kind == "ok", kind, time.perf_counter() - start)

    async def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """`function(**arguments)`: an async one here, a plain one in a thread."""
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(**arguments)
        whose = f"tool {self.name!r}"
        value = await in_thread(functools.partial(function, **arguments), whose, self.timeout)
        return await value if inspect.isawaitable(value) else value

    def _function(self, context: Context) -> Callable[..., Any]:
        """The function; a method of the episode's own object where it was given by its class."""
        if self._method and self.owner is not None:
            return self.function.__get__(self._filler.state(context, self.owner, self.owner), self.owner)  # type: ignore[no-any-return]
        return self.function


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = 10.0,
    max_tokens: int = 512,
    max_chars: int = 4000,
    stateful: bool = False,
    terminal: bool = False,
    limit: Limit | None = None,
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

        @tool(timeout=60, max_tokens=200)
        async def search(query: str) -> list[str]: ...

        @tool(terminal=True)
        def finish(answer: str) -> str: ...
    """
    return Tool(function, **options) if function is not None else functools.partial(Tool, **options)


def describe(
    name: str, function: Callable[..., Any], descriptions: Mapping[str, str]
) -> tuple[Arguments, Filler, bool]:
    """What the model writes, what the episode fills, and whether the function still wants its `self`."""
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError as error:
        raise TypeError(
            f"tool {name!r}: a type in its signature cannot be resolved ({error}); import it at the top of the module"
        ) from error
    method = bool(parameters) and parameters[0].name == "self" and parameters[0].annotation is inspect.Parameter.empty
    parameters = parameters[1:] if method else parameters
    marks = {parameter.name: mark for parameter in parameters if (mark := mark_of(parameter.annotation)) is not None}
    optional = frozenset(p.name for p in parameters if p.default is not p.empty)
    try:
        takes = Arguments(name, [p for p in parameters if p.name not in marks], descriptions)
    except PydanticUserError as error:
        raise TypeError(
            f"tool {name!r}: a type in its signature has no JSON form ({error.message}); take numbers, text, lists, "
            "dicts, dataclasses or pydantic models, or mark the parameter with Given, State or Context"
        ) from error
    return takes, Filler(name, marks, optional), method


def as_text(value: Any) -> str:
    """What the model reads: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=plain)


def plain(value: Any) -> Any:
    """A JSON form of what JSON does not have: records as objects, the rest as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.model_dump() if callable(getattr(value, "model_dump", None)) else str(value)
