"""The tools that a configuration names: created or connected, with rate limits and retries, and closed with the run."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from arborl.config.tool_config import ToolConfig
from arborl.errors import ArborError, ConfigError, EpisodeError, UnknownPartError, boundary, paused_deadlines
from arborl.registry import short_name
from arborl.retry import backoff_waits, retry
from arborl.sandbox.fair_semaphore import FairSemaphore
from arborl.tools.core.rate_limit import RateLimit
from arborl.tools.core.tool import AnyTool, CallLimiter, Tool
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.core.toolbox import as_tool, placeholder_tool
from arborl.tools.remote.tool_client import CodeServerClient, ToolClient
from arborl.types import ToolResult

if TYPE_CHECKING:
    from arborl.tools.remote.mcp import McpClient

log = logging.getLogger(__name__)

FOREIGN_VARIABLES = {
    "RATE_LIMIT_PER_MINUTE": "limit: {per_minute: N}",
    "TOOL_MAX_WORKERS": "concurrency: N",
    "TOOL_REQUEST_INTERVAL": "limit: {per_minute: 60 / SECONDS}",
}
"""Environment variables of other systems -> the setting to write instead."""
DEFAULT_SERVER_TIMEOUT = 60.0


class ToolLoader:
    """Loads the tool entries of a configuration. Equal entries of several sources share their tools.

    Args:
        find: name -> tool or class of tools.
        connect: False only checks: no class is instantiated and no server is contacted; servers give no tools.
    """

    def __init__(self, find: Callable[[str], Any], connect: bool = True):
        self.find, self.connect = find, connect
        self.limits: list[RateLimit] = []
        self.clients: list[ToolClient] = []
        self.mcp_clients: list[McpClient] = []
        self.loaded: dict[str, tuple[ToolConfig, list[AnyTool]]] = {}

    def load(self, entry: ToolConfig, where: str, args_where: str | None = None) -> list[AnyTool]:
        key = repr(entry)
        if key not in self.loaded:
            self.loaded[key] = entry, self._load(entry, where, args_where or f"{where}.args")
        return self.loaded[key][1]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """As `close`, without an event loop, for callers that have made no calls."""
        if self.mcp_clients:
            with ThreadPoolExecutor(len(self.mcp_clients)) as threads:
                list(threads.map(lambda client: client.close(), self.mcp_clients))
        for limit in self.limits:
            limit.remove()

    def _load(self, entry: ToolConfig, where: str, args_where: str) -> list[AnyTool]:
        if entry.name is not None:
            try:
                found = self.find(entry.name)
            except UnknownPartError as error:
                raise UnknownPartError(f"{where}: {error}") from error
            made = (as_tool if self.connect else placeholder_tool)(found, entry.args, args_where)
            limits = (entry.limit, entry.concurrency, entry.timeout, entry.retries)
            return [made if limits == (None,) * 4 else LimitedTool(made, self._policy(entry, where))]
        key = self._variable(entry.api_key_env, f"{where}.api_key_env")
        if not self.connect:
            return []
        try:
            return self._from_server(entry, key) if entry.server is not None else self._from_mcp(entry, key, where)
        except ConfigError as error:
            if str(error).startswith(f"{where}."):
                raise
            raise ConfigError(f"{where}: {error}") from error

    def _from_server(self, entry: ToolConfig, key: str | None) -> list[AnyTool]:
        limit = self._limit(entry, key)
        seconds = entry.timeout or DEFAULT_SERVER_TIMEOUT
        call_seconds = 2 * seconds if entry.retries is None else (entry.retries + 1) * (seconds + 8)
        options: dict[str, Any] = {
            "concurrency": entry.concurrency or 64,
            "attempt_seconds": seconds,
            "call_seconds": max(120.0, call_seconds),
            "limit": limit,
            "retries": entry.retries,
        }
        client = (
            CodeServerClient(str(entry.server), key, entry.code_prefix, **options)
            if entry.protocol == "execute"
            else ToolClient(entry.server, key, **options)
        )
        self.clients.append(client)
        tools = client.tools(entry.tools)
        return [LimitedTool(tool, CallPolicy(), entry.prefix + tool.name) if entry.prefix else tool for tool in tools]

    def _from_mcp(self, entry: ToolConfig, key: str | None, where: str) -> list[AnyTool]:
        from arborl.tools.remote.mcp import McpClient

        config = entry.mcp
        assert config is not None
        passed = {name: self._variable(name, f"{where}.mcp.pass_env") or "" for name in config.pass_env}
        client = McpClient(
            config.url or config.command,
            config.env | passed,
            {"Authorization": f"Bearer {key}"} if key else None,
            entry.timeout or 30.0,
            config.stateful,
            entry.tools,
            cwd=config.cwd,
        )
        self.mcp_clients.append(client)
        policy = self._policy(entry, where)
        policy.timeout = None  # the client enforces it
        return [LimitedTool(tool, policy, entry.prefix + tool.name) for tool in client.tools()]

    def _policy(self, entry: ToolConfig, where: str) -> CallPolicy:
        try:
            limit = self._limit(entry, None)
        except ConfigError as error:
            raise ConfigError(f"{where}.limit: {error}") from error
        return CallPolicy(limit, entry.concurrency, entry.timeout, entry.retries or 0)

    def _limit(self, entry: ToolConfig, key: str | None) -> RateLimit | None:
        config = entry.limit
        if config is None:
            return None
        server = entry.server if config.server == "auto" else config.server
        scope: Literal["host", "cluster"] = "host" if config.server is None else "cluster"
        api_key = key if server == entry.server else None
        name = config.name or f"tools of {entry.origin}"
        limit = RateLimit(config.per_minute, config.burst, name, scope, server, api_key)
        if self.connect:
            limit.check()
            self.limits.append(limit)
        return limit

    def _variable(self, name: str | None, where: str) -> str | None:
        """Value of an environment variable. It is never logged."""
        if name is None:
            return None
        if not os.environ.get(name):
            raise ConfigError(f"{where}: the environment has no {name}. Write: export {name}=…")
        return os.environ[name]


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


def merge_tool_args(
    entries: Sequence[ToolConfig], args: Mapping[str, Mapping[str, Any]], where: str, known: Iterable[ToolConfig]
) -> list[tuple[ToolConfig, str, str]]:
    """Entries with their arguments from `agent.tool_args`, and the key paths of each entry and its arguments."""
    if unknown := [name for name in args if name not in tool_names(known)]:
        raise ConfigError(f"{where}agent.tool_args.{unknown[0]}: no such tool here. Write {where}tools=[{unknown[0]}].")
    merged = []
    for index, entry in enumerate(entries):
        entry_path = f"{where}tools.{index}"
        args_path = f"{entry_path}.args"
        key = next((name for name in (entry.name, short_name(entry.name or "")) if name in args), None)
        if key is not None:
            source = f"{where}agent.tool_args.{key}"
            if duplicates := [name for name in args[key] if name in entry.args]:
                raise ConfigError(f"{source}.{duplicates[0]}: also set in {entry_path}. Keep one.")
            args_path = args_path if entry.args else source
            entry = entry.model_copy(update={"args": {**entry.args, **args[key]}})
        merged.append((entry, entry_path, args_path))
    return merged


def tool_names(entries: Iterable[ToolConfig]) -> set[str]:
    full = [entry.name for entry in entries if entry.name is not None]
    return {*full, *map(short_name, full)}


def warn_foreign_variables(entries: Sequence[ToolConfig]) -> None:
    for name, setting in FOREIGN_VARIABLES.items() if entries else ():
        if os.environ.get(name):
            log.warning("the environment variable %s has no effect. Write in the tool's entry: %s", name, setting)
