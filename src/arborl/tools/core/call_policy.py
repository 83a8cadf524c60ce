"""Rate limit, concurrency limit, timeout and retries of a tool."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arborl.errors import ArborError, EpisodeError, boundary, paused_deadlines
from arborl.sandbox.fair_semaphore import FairSemaphore
from arborl.tools.core.tool import AnyTool, CallLimiter, Tool
from arborl.tools.core.tool_context import ToolContext
from arborl.types import ToolResult

RETRIED_KINDS = ("exception", "timeout", "unavailable")
"""Kinds of failure that a retry can cure; invalid arguments are not among them."""


def backoff_seconds(attempt: int, first: float, longest: float) -> float:
    """Wait before retry `attempt` (from 0): exponential backoff with a jitter of ±50 %."""
    return min(first * 2 ** min(attempt, 10), longest) * random.uniform(0.5, 1.5)


class CallPolicy:
    """Limits that the tools of one entry share. Waiting for a limit does not count towards deadlines.

    Args:
        limit: every attempt waits for it.
        concurrency: concurrent attempts; None for no limit.
        timeout: seconds per attempt; None for the tool's timeout.
        retries: attempts after the first.
        backoff: seconds before the first retry; doubled with each retry up to `max_backoff`.
    """

    def __init__(
        self,
        limit: CallLimiter | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        backoff: float = 0.1,
        max_backoff: float = 5.0,
    ):
        self.limit, self.timeout, self.retries = limit, timeout, retries
        self.backoff, self.max_backoff = backoff, max_backoff
        self.semaphore = FairSemaphore(concurrency) if concurrency is not None else None

    async def run(self, tool: AnyTool, arguments: Mapping[str, Any], context: ToolContext | None) -> ToolResult:
        start = time.perf_counter()
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(backoff_seconds(attempt - 1, self.backoff, self.max_backoff))
            if self.semaphore is None:
                result = await self._attempt(tool, arguments, context)
            else:
                await self.semaphore.acquire()
                try:
                    result = await self._attempt(tool, arguments, context)
                finally:
                    self.semaphore.release()
            if result.kind not in RETRIED_KINDS:
                break
        return ToolResult(result.content, result.ok, result.kind, time.perf_counter() - start)

    async def _attempt(self, tool: AnyTool, arguments: Mapping[str, Any], context: ToolContext | None) -> ToolResult:
        if self.limit is not None:
            try:
                with paused_deadlines():
                    await self.limit.acquire()
            except ArborError as error:  # the limit's server does not answer, or the limit has other numbers
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


class LimitedTool:
    """A tool with a call policy.

    Args:
        tool: the tool.
        policy: shared by the tools of an entry.
        name: another name for the model.
    """

    def __init__(self, tool: AnyTool, policy: CallPolicy, name: str | None = None):
        if isinstance(tool, Tool) and policy.timeout is not None:  # a local tool enforces its timeout itself
            tool = copy.copy(tool)
            tool.timeout = policy.timeout
        self.tool, self.policy = tool, policy
        self.name = name or tool.name
        self.spec = replace(tool.spec, name=self.name)
        self.stateful, self.terminal = tool.stateful, tool.terminal
        self.sandboxed = getattr(tool, "sandboxed", False)

    def __repr__(self) -> str:
        return f"LimitedTool({self.tool!r})"

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        return await self.policy.run(self.tool, arguments, context)
