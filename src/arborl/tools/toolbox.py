"""Answers the tool calls of one message: all at once, in order, and whatever they are."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arborl.errors import ConfigError, did_you_mean
from arborl.registry import call_checked, check_arguments
from arborl.spans import span
from arborl.tools.injection import Context
from arborl.tools.tool import AnyTool, Tool
from arborl.types import ToolCall, ToolResult, ToolSpec


class Toolbox:
    """Tools by name. A plain function is taken as `@tool` would take it.

    Example:
        box = Toolbox([calculator])
        await box.run([ToolCall("1", "calculator", {"expression": "6*7"})])      # [ToolResult("42")]
        await box.run([ToolCall("2", "calculater")])      # no tool is called 'calculater'. Did you mean 'calculator'? …

    Args:
        tools: what may be called.
        max_calls: calls of one message that are run; those beyond are answered with that.
    """

    def __init__(self, tools: Sequence[AnyTool | Callable[..., Any]] = (), max_calls: int = 16):
        if max_calls < 1:
            raise ValueError(f"max_calls={max_calls}: give 1 or more")
        self.max_calls = max_calls
        self.tools: dict[str, AnyTool] = {}
        for given in tools:
            made = as_tool(given)
            if made.name in self.tools:
                raise ConfigError(
                    f"two tools are called {made.name!r}; give one another name: @tool(name=…), or prefix: NAME_ "
                    "beside the server that it comes from."
                )
            self.tools[made.name] = made

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the model is told."""
        return tuple(made.spec for made in self.tools.values())

    def is_terminal(self, call: ToolCall) -> bool:
        """Whether the call is to a tool that ends the episode."""
        return call.name in self.tools and self.tools[call.name].terminal

    def ends(self, call: ToolCall, result: ToolResult) -> bool:
        """Whether this call ended the episode: it was to a terminal tool, and it worked."""
        return result.ok and self.is_terminal(call)

    async def run(self, calls: Sequence[ToolCall], context: Context | None = None) -> list[ToolResult]:
        """One result a call, in the order of the calls.

        They run at once, except those to stateful tools: these wait for each other, so that what the second finds does
        not depend on chance. Without a `context`, state lasts for these calls only.
        """
        if context is None:
            async with Context() as once:
                return await self.run(calls, once)
        held = [index for index, call in enumerate(calls) if self._is_stateful(call)]
        results: dict[int, ToolResult] = {}

        async def answer(indices: Sequence[int]) -> None:
            for index in indices:
                results[index] = await self._traced(index, calls[index], context)

        free = [[index] for index in range(len(calls)) if index not in held]
        await asyncio.gather(*map(answer, [*free, held]))
        return [results[index] for index in range(len(calls))]

    def _is_stateful(self, call: ToolCall) -> bool:
        return call.name in self.tools and self.tools[call.name].stateful

    async def _traced(self, index: int, call: ToolCall, context: Context) -> ToolResult:
        operation, named = "execute_tool", call.name[:80]
        with span(f"{operation} {named}", gen_ai__operation__name=operation, gen_ai__tool__name=named) as told:
            result = await self._answer(index, call, context)
            if not result.ok:
                told.fail(result.kind)
            return result

    async def _answer(self, index: int, call: ToolCall, context: Context) -> ToolResult:
        if index >= self.max_calls:
            return ToolResult(f"not run: one message may hold {self.max_calls} calls", False, "too_many")
        if call.error is not None:
            return ToolResult(call.error, False, "malformed")
        if call.name not in self.tools:
            known = f"Known: {', '.join(self.tools)}." if self.tools else "There are no tools."
            text = f"no tool is called {call.name[:80]!r}.{did_you_mean(call.name, self.tools)} {known}"
            return ToolResult(text, False, "unknown_tool")
        return await self.tools[call.name].run(call.arguments, context)


def as_tool(given: Any, args: Mapping[str, Any] | None = None, where: str = "args") -> AnyTool:
    """A tool from a tool, a function, or a class that makes one.

    Example:
        as_tool(calculator)
        as_tool(Search, {"corpus": "docs.jsonl"})      # Search(corpus="docs.jsonl")
    """
    if inspect.isclass(given):
        given = call_checked(given, args or {}, where)
    elif args:
        raise ConfigError(f"{where}: {getattr(given, 'name', given)!r} is a tool already and takes no arguments.")
    if isinstance(given, Tool) and given.unbound:
        owner = given.owner.__name__ if given.owner else "Class"
        raise ConfigError(
            f"tool {given.name!r} is a method without its object. Give {owner}().{given.name}, which all episodes "
            "share, or write @tool(stateful=True) to have a fresh object for each."
        )
    if isinstance(given, Tool) or all(hasattr(given, part) for part in ("name", "spec", "run")):
        return given  # type: ignore[no-any-return]
    if not callable(given):
        raise ConfigError(f"{given!r} is not a tool: give a function, or what @tool makes of one.")
    return Tool(given)


def stand_in(given: Any, args: Mapping[str, Any] | None = None, where: str = "args") -> AnyTool:
    """The same without making anything of a class: its arguments are checked, and a tool by its name that cannot be
    called takes its place."""
    if not inspect.isclass(given):
        return as_tool(given, args, where)
    check_arguments(given, args or {}, where)

    def absent(query: str) -> str:
        """Stands for a tool that is not made.

        Args:
            query: anything.
        """
        raise RuntimeError(f"{given.__name__} was looked at, and not made")

    return Tool(absent, name=str(getattr(given, "name", given.__name__.lower())))
