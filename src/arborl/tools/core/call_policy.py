"""Rate limit, concurrency limit, timeout and retries of a tool."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from arborl.errors import ArborError, EpisodeError, boundary, paused_deadlines
from arborl.retry import backoff_waits, retry
from arborl.sandbox.fair_semaphore import FairSemaphore
from arborl.tools.core.tool import AnyTool, CallLimiter, Tool
from arborl.tools.core.tool_context import ToolContext
from arborl.types import ToolResult

RETRIED_KINDS = ("exception", "timeout", "unavailable")
"""Kinds of failure that a retry can cure; invalid arguments are not among them."""


class CallPolicy:
    """Limits that the tools of one entry share. Waiting for a limit does not count towards deadlines.

    Args:
        limit: every attempt waits for it.
        concurrency: concurrent attempts; None for no limit.
        timeout: seconds per attempt; None for the tool's timeout.
        retries: attempts after the first.
        backoff: seconds before the first retry.
    """

    def __init__(
        self,
        limit: CallLimiter | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        backoff: float = 0.1,
    ):
        self.limit, self.timeout, self.retries, self.backoff = limit, timeout, retries, backoff
        self.semaphore = FairSemaphore(concurrency) if concurrency is not None else None

    async def run(self, tool: AnyTool, arguments: Mapping[str, Any], context: ToolContext | None) -> ToolResult:
        async def attempt() -> ToolResult:
            async with self.semaphore or nullcontext():
                return await self._attempt(tool, arguments, context)

        start = time.perf_counter()
        waits = backoff_waits(self.retries, self.backoff, 5.0, jitter=0.5)
        result = await retry(attempt, waits, lambda result: result.kind in RETRIED_KINDS)
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
    """A tool with a call policy, and with another name for the model if `name` is given."""

    def __init__(self, tool: AnyTool, policy: CallPolicy, name: str | None = None):
        if isinstance(tool, Tool) and policy.timeout is not None:  # a local tool enforces its timeout itself
            tool = copy.copy(tool)
            tool.timeout = policy.timeout
        self.tool, self.policy = tool, policy
        self.name = name or tool.name
        self.spec = replace(tool.spec, name=self.name)
        self.stateful, self.terminal = tool.stateful, tool.terminal
        self.sandboxed = getattr(tool, "sandboxed", False)

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        return await self.policy.run(self.tool, arguments, context)
