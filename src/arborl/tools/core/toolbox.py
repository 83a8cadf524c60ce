"""Runs the tool calls of one message."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from arborl.errors import ConfigError, did_you_mean
from arborl.registry import call_checked, check_arguments
from arborl.spans import span
from arborl.tools.core.tool import AnyTool, Tool
from arborl.tools.core.tool_context import ToolContext
from arborl.types import ToolCall, ToolResult, ToolSpec

log = logging.getLogger(__name__)


class Toolbox:
    """Tools by name. A plain function becomes a tool as with `@tool`.

    Example:
        box = Toolbox([calculator])
        await box.run([ToolCall("1", "calculator", {"expression": "6*7"})])      # [ToolResult("42")]
        await box.run([ToolCall("2", "calculater")])      # there is no tool 'calculater'. Did you mean 'calculator'? …

    Args:
        tools: tools or functions.
        max_calls: maximum number of calls in one message; further calls get an error result.
    """

    def __init__(self, tools: Sequence[AnyTool | Callable[..., Any]] = (), max_calls: int = 16):
        if max_calls < 1:
            raise ValueError(f"max_calls={max_calls}: give 1 or more")
        self.max_calls = max_calls
        self.tools: dict[str, AnyTool] = {}
        for item in tools:
            made = as_tool(item)
            if made.name in self.tools:
                raise ConfigError(
                    f"two tools have the name {made.name!r}; rename one: @tool(name=…), or prefix: NAME_ in the "
                    "entry of its server."
                )
            self.tools[made.name] = made

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(made.spec for made in self.tools.values())

    def is_terminal(self, call: ToolCall) -> bool:
        return call.name in self.tools and self.tools[call.name].terminal

    def ends(self, call: ToolCall, result: ToolResult) -> bool:
        return result.ok and self.is_terminal(call)

    async def run(self, calls: Sequence[ToolCall], context: ToolContext | None = None) -> list[ToolResult]:
        """Results in the order of the calls. Calls run concurrently, except those of stateful tools, which run one
        after another. Without a `context`, state lasts for these calls."""
        if context is None:
            async with ToolContext() as temporary:
                return await self.run(calls, temporary)
        stateful = {name for name, tool in self.tools.items() if tool.stateful}
        sequential = [index for index, call in enumerate(calls) if call.name in stateful]
        results: dict[int, ToolResult] = {}

        async def run_in_order(indices: Sequence[int]) -> None:
            for index in indices:
                results[index] = await self._run_traced(index, calls[index], context)

        concurrent = [[index] for index in range(len(calls)) if index not in sequential]
        await asyncio.gather(*map(run_in_order, [*concurrent, sequential]))
        return [results[index] for index in range(len(calls))]

    async def _run_traced(self, index: int, call: ToolCall, context: ToolContext) -> ToolResult:
        operation, named = "execute_tool", call.name[:80]
        with span(f"{operation} {named}", gen_ai__operation__name=operation, gen_ai__tool__name=named) as trace:
            result = await self._run_one(index, call, context)
            if not result.ok:
                trace.fail(result.kind)
            return result

    async def _run_one(self, index: int, call: ToolCall, context: ToolContext) -> ToolResult:
        if index >= self.max_calls:
            return ToolResult(f"not run: a message may contain {self.max_calls} calls", False, "too_many")
        if call.error is not None:
            return ToolResult(call.error, False, "malformed")
        if call.name not in self.tools:
            known = f"Known: {', '.join(self.tools)}." if self.tools else "There are no tools."
            text = f"there is no tool {call.name[:80]!r}.{did_you_mean(call.name, self.tools)} {known}"
            return ToolResult(text, False, "unknown_tool")
        return await self.tools[call.name].run(call.arguments, context)


def as_tool(item: Any, args: Mapping[str, Any] | None = None, where: str = "args") -> AnyTool:
    """A tool from a tool, a function, or a class of tools."""
    if inspect.isclass(item):
        item = call_checked(item, args or {}, where)
    elif args:
        raise ConfigError(f"{where}: {getattr(item, 'name', item)!r} is a tool, not a class: it takes no arguments.")
    if isinstance(item, Tool) and item.is_unbound:
        owner = item.owner.__name__ if item.owner else "Class"
        raise ConfigError(
            f"tool {item.name!r} is a method without an object. Give {owner}().{item.name}, shared by all episodes, "
            "or write @tool(stateful=True) for a new object per episode."
        )
    if isinstance(item, Tool) or all(hasattr(item, part) for part in ("name", "spec", "run")):
        return item  # type: ignore[no-any-return]
    if not callable(item):
        raise ConfigError(f"{item!r} is not a tool: give a function or a tool.")
    return Tool(item)


def placeholder_tool(item: Any, args: Mapping[str, Any] | None = None, where: str = "args") -> AnyTool:
    """As `as_tool`, without instantiating a class: its arguments are checked, and the tool cannot be called."""
    if not inspect.isclass(item):
        return as_tool(item, args, where)
    check_arguments(item, args or {}, where)

    def absent(query: str) -> str:
        """Placeholder of a tool.

        Args:
            query: anything.
        """
        raise RuntimeError(f"{item.__name__} is a placeholder")

    return Tool(absent, name=str(getattr(item, "name", item.__name__.lower())))


def warn_incomplete_specs(tools: Iterable[AnyTool]) -> None:
    for tool in tools:
        if missing := missing_parts(tool.spec):
            seen = json.dumps({"name": tool.spec.name, "description": tool.spec.description} | tool.spec.parameters)
            log.warning(
                "tool %r has %s. The model sees only: %s. Write types in its signature, and a docstring with "
                "Args.", tool.name, " and ".join(missing), seen,
            )  # fmt: skip


def missing_parts(spec: ToolSpec) -> list[str]:
    """Missing parts of a spec: `["no docstring", "no type for 'city'"]`."""
    missing = [] if spec.description.strip() else ["no docstring"]
    properties = spec.parameters.get("properties", {})
    typed = ("type", "anyOf", "allOf", "oneOf", "enum", "const", "$ref")
    bare = [repr(name) for name, about in properties.items() if not any(key in about for key in typed)]
    return missing + ([f"no type for {', '.join(bare)}"] if bare else [])
