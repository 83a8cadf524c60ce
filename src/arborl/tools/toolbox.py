"""Answers the tool calls of one message: all at once, in order, and whatever they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from arborl.errors import ConfigError, did_you_mean
from arborl.tools.tool import Tool
from arborl.types import ToolCall, ToolResult, ToolSpec


class Toolbox:
    """Tools by name. A plain function is taken as `@tool` would take it.

    Example:
        box = Toolbox([calculator])
        await box.run([ToolCall("1", "calculator", {"expression": "6*7"})])      # [ToolResult("42")]
        await box.run([ToolCall("2", "calculater")])      # no tool is called 'calculater'. Did you mean 'calculator'? …
    """

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = ()):
        self.tools: dict[str, Tool] = {}
        for given in tools:
            made = given if isinstance(given, Tool) else Tool(given)
            if made.name in self.tools:
                raise ConfigError(f"two tools are called {made.name!r}; give one another name: @tool(name=…)")
            self.tools[made.name] = made

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the model is told."""
        return tuple(made.spec for made in self.tools.values())

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result a call, in the order of the calls."""
        return list(await asyncio.gather(*(self._answer(call) for call in calls)))

    async def _answer(self, call: ToolCall) -> ToolResult:
        if call.error is not None:
            return ToolResult(call.error, False, "malformed")
        if call.name not in self.tools:
            known = f"Known: {', '.join(self.tools)}." if self.tools else "There are no tools."
            text = f"no tool is called {call.name!r}.{did_you_mean(call.name, self.tools)} {known}"
            return ToolResult(text, False, "unknown_tool")
        return await self.tools[call.name].run(call.arguments)
