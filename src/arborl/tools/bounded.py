"""Bounds of a tool that a configuration sets: how often, how many at once, how long, and how often again."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arborl.errors import ArborError, EpisodeError, boundary, paused_deadlines
from arborl.sandbox.slots import Slots
from arborl.tools.injection import Context
from arborl.tools.tool import AnyTool, Limit, Tool
from arborl.types import ToolResult

AGAIN = ("exception", "timeout", "unavailable")
"""Kinds of failure after which another try may do better; what the model wrote stays as wrong as it was."""


class Bounds:
    """What the tools of one entry share.

    Args:
        limit: every try waits for it.
        concurrency: tries under way at a time; None for any number.
        timeout: seconds of one try; None leaves it to the tool.
        retries: tries after the first.
        pause: seconds before the second try, about; doubled with each, with chance, up to `longest_pause`.
    """

    def __init__(
        self,
        limit: Limit | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        pause: float = 0.1,
        longest_pause: float = 5.0,
    ):
        self.limit, self.timeout, self.retries = limit, timeout, retries
        self.pause, self.longest_pause = pause, longest_pause
        self.slots = Slots(concurrency) if concurrency is not None else None

    async def run(self, tool: AnyTool, arguments: Mapping[str, Any], context: Context | None) -> ToolResult:
        """Answer one call within the bounds. Who waits for a turn is not on the clock of the episode either."""
        start = time.perf_counter()
        for attempt in range(self.retries + 1):
            if attempt:
                pause = min(self.pause * 2 ** min(attempt - 1, 10), self.longest_pause)
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            result = await self._in_turn(tool, arguments, context)
            if result.kind not in AGAIN:
                break
        return ToolResult(result.content, result.ok, result.kind, time.perf_counter() - start)

    async def _in_turn(self, tool: AnyTool, arguments: Mapping[str, Any], context: Context | None) -> ToolResult:
        if self.slots is None:
            return await self._once(tool, arguments, context)
        await self.slots.take()
        try:
            return await self._once(tool, arguments, context)
        finally:
            self.slots.give()

    async def _once(self, tool: AnyTool, arguments: Mapping[str, Any], context: Context | None) -> ToolResult:
        if self.limit is not None:
            try:
                with paused_deadlines():
                    await self.limit.acquire()
            except ArborError as error:  # the limit is kept elsewhere, and nobody answers there; or it is another's
                return ToolResult(f"{tool.name}: {error}", False, "unavailable")
        if self.timeout is None or isinstance(tool, Tool):
            return await tool.run(arguments, context)
        try:
            async with boundary(f"tool {tool.name!r}", self.timeout):
                return await tool.run(arguments, context)
        except EpisodeError as error:
            if not isinstance(error.cause, TimeoutError):
                raise
            return ToolResult(f"{tool.name}: TimeoutError: {error.cause}", False, "timeout")


class Bounded:
    """A tool within bounds, to be used as the tool.

    Args:
        tool: what answers.
        bounds: shared by the tools of an entry.
        name: what it is called here, where that is not its own name.
    """

    def __init__(self, tool: AnyTool, bounds: Bounds, name: str | None = None):
        if isinstance(tool, Tool) and bounds.timeout is not None:  # it keeps its own time, and says so in its words
            tool = copy.copy(tool)
            tool.timeout = bounds.timeout
        self.tool, self.bounds = tool, bounds
        self.name = name or tool.name
        self.spec = replace(tool.spec, name=self.name)
        self.stateful, self.terminal = tool.stateful, tool.terminal
        self.sandboxed = getattr(tool, "sandboxed", False)

    def __repr__(self) -> str:
        return f"Bounded({self.tool!r})"

    async def run(self, arguments: Mapping[str, Any], context: Context | None = None) -> ToolResult:
        return await self.bounds.run(self.tool, arguments, context)
