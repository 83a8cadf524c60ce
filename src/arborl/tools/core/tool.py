"""A tool: a function, its description for the model, and `run`, which returns a result for any arguments."""

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
from arborl.tools.core.arguments import ArgumentError, ToolArguments, parse_docstring
from arborl.tools.core.background_threads import run_in_thread
from arborl.tools.core.tool_context import ParameterInjector, ToolContext, injection_marker, truncate
from arborl.types import ToolResult, ToolSpec


class AnyTool(Protocol):
    """Interface of a tool, local or remote. `stateful` calls of one turn run in the order written, all others
    concurrently. A `terminal` call ends the episode."""

    name: str
    spec: ToolSpec
    stateful: bool
    terminal: bool

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult: ...


class CallLimiter(Protocol):
    """A limiter that a call waits for, such as `arborl.tools.RateLimit`."""

    async def acquire(self) -> Any: ...


class Tool:
    """A function that a model can call. Made by `@tool`; still callable as the function.

    Args:
        function: plain or async, or a method. A plain function runs in a thread.
        name: name for the model; by default the function's name.
        description: description for the model; by default the first part of the docstring.
        timeout: seconds per call. A thread cannot be stopped: a plain function continues after its timeout.
        max_tokens: maximum tokens of a result, by the model's tokenizer where known; longer results are cut.
        max_chars: maximum characters of a result.
        stateful: results depend on earlier calls. Calls of one turn then run in the order written. A stateful method of
            a class (`Notebook.note`) gets a new object per episode.
        terminal: a successful call ends the episode; its result is the answer.
        limit: each call waits for `await limit.acquire()`; the wait does not count towards `timeout`.
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
        limit: CallLimiter | None = None,
    ):
        for key, value in (("timeout", timeout), ("max_tokens", max_tokens), ("max_chars", max_chars)):
            if value <= 0:
                raise ValueError(f"{key}={value}: give more than 0")
        self.function, self.timeout, self.limit = function, timeout, limit
        self.max_tokens, self.max_chars = max_tokens, max_chars
        self.stateful, self.terminal = stateful, terminal
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.sandboxed = False  # it runs code in the sandbox; a run with such a tool logs the isolation level
        self.owner: type | None = None  # class of an unbound method
        text = parse_docstring(inspect.getdoc(function))
        self._arguments, self.injector, self._is_method = inspect_function(self.name, function, text.arguments)
        self.spec = ToolSpec(self.name, description or text.description, self._arguments.schema)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def __set_name__(self, owner: type, name: str) -> None:
        if self._is_method:
            self.owner = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """A method looked up on an object is a tool bound to that object."""
        if instance is None or self.owner is None:
            return self
        bound = object.__new__(type(self))
        bound.__dict__ = {**self.__dict__, "function": self.function.__get__(instance, owner), "owner": None}
        bound._is_method = False
        return bound

    @property
    def is_unbound(self) -> bool:
        return self._is_method and not (self.stateful and self.owner is not None)

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        """Run one call. Invalid arguments, exceptions and timeouts are results too. Without a `context`, state lasts
        for this call."""
        if context is None:
            async with ToolContext() as temporary:
                return await self.run(arguments, temporary)
        start = time.perf_counter()
        function, injected = self._function(context), self.injector.values(context)
        try:
            checked = self._arguments.check(arguments)
            if self.limit is not None:
                await self.limit.acquire()
            async with boundary(f"tool {self.name!r}", self.timeout):
                content, kind = as_text(await self._call(function, checked | injected)), "ok"
        except ArgumentError as error:
            content, kind = str(error), "arguments"
        except EpisodeError as error:
            content = f"{self.name}: {type(error.cause).__name__}: {error.cause}"
            kind = "timeout" if error.kind == "timeout" else "exception"
        kept = truncate(content, self.max_chars, self.max_tokens, context.tokenizer)
        return ToolResult(kept, kind == "ok", kind, time.perf_counter() - start)

    async def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(**arguments)
        call = functools.partial(function, **arguments)
        value = await run_in_thread(call, f"tool {self.name!r}", self.timeout)
        return await value if inspect.isawaitable(value) else value

    def _function(self, context: ToolContext) -> Callable[..., Any]:
        """The function; an unbound method is bound to the episode's object."""
        if self._is_method and self.owner is not None:
            return self.function.__get__(self.injector.state(context, self.owner, self.owner), self.owner)  # type: ignore[no-any-return]
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
    limit: CallLimiter | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool from a function: types from its signature, descriptions from its docstring.

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


def inspect_function(
    name: str, function: Callable[..., Any], descriptions: Mapping[str, str]
) -> tuple[ToolArguments, ParameterInjector, bool]:
    """Arguments of the model, injected parameters, and whether the function is an unbound method."""
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError as error:
        raise TypeError(
            f"tool {name!r}: a type in its signature cannot be resolved ({error}); import it at the top of the module"
        ) from error
    is_method = [(p.name, p.annotation) for p in parameters[:1]] == [("self", inspect.Parameter.empty)]
    parameters = parameters[1:] if is_method else parameters
    markers = {one.name: marker for one in parameters if (marker := injection_marker(one.annotation)) is not None}
    optional = frozenset(p.name for p in parameters if p.default is not p.empty)
    try:
        arguments = ToolArguments(name, [p for p in parameters if p.name not in markers], descriptions)
    except PydanticUserError as error:
        raise TypeError(
            f"tool {name!r}: a type in its signature has no JSON form ({error.message}); take numbers, text, lists, "
            "dicts, dataclasses or pydantic models, or mark the parameter with TaskField, EpisodeState or ToolContext"
        ) from error
    return arguments, ParameterInjector(name, markers, optional), is_method


def as_text(value: Any) -> str:
    """Text of a result for the model: a str unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=to_json_value)


def to_json_value(value: Any) -> Any:
    """JSON form of other types: dataclasses and pydantic models as objects, the rest as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.model_dump() if callable(getattr(value, "model_dump", None)) else str(value)
