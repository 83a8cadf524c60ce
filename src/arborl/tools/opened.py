"""The tools that a configuration names: made or connected to, within their limits, and closed with the run."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from arborl.config.tool_config import ToolConfig
from arborl.errors import ConfigError, UnknownPartError
from arborl.registry import short_name
from arborl.tools.bounded import Bounded, Bounds
from arborl.tools.client import ToolClient
from arborl.tools.limit import RateLimit
from arborl.tools.tool import AnyTool
from arborl.tools.toolbox import as_tool, stand_in

if TYPE_CHECKING:
    from arborl.tools.mcp import McpServer

log = logging.getLogger(__name__)

ELSEWHERE = {
    "RATE_LIMIT_PER_MINUTE": "limit: {per_minute: N}",
    "TOOL_MAX_WORKERS": "concurrency: N",
    "TOOL_REQUEST_INTERVAL": "limit: {per_minute: 60 / SECONDS}",
}
"""Variables that other systems read, and what to write here instead."""
SERVER_SECONDS = 60.0
"""What one request to a tool server may take where nobody said."""


class OpenTools:
    """Opens entries of a configuration. The same entry, in several sources, is opened once and shared.

    Args:
        find: the tool, or the class that makes one, that a name stands for.
        connect: False only looks: no tool is made of a class, no server started or asked, and those give no tools.
    """

    def __init__(self, find: Callable[[str], Any], connect: bool = True):
        self.find, self.connect = find, connect
        self.limits: list[RateLimit] = []
        self.clients: list[ToolClient] = []
        self.servers: list[McpServer] = []
        self.opened: dict[str, tuple[ToolConfig, list[AnyTool]]] = {}
        """Every entry, by how it is written, with its tools."""

    def open(self, entry: ToolConfig, where: str, args_where: str | None = None) -> list[AnyTool]:
        """The tools of one entry.

        Args:
            entry: what a configuration says.
            where: its key, which begins whatever is said to be wrong with it or with its server (`ConfigError`).
            args_where: the key of its arguments.
        """
        key = repr(entry)
        if key not in self.opened:
            self.opened[key] = entry, self._open(entry, where, args_where or f"{where}.args")
        return self.opened[key][1]

    async def close(self) -> None:
        """End what was started, and let go what was connected to."""
        for client in self.clients:
            await client.close()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """As `close`, for callers without an event loop, who have made no calls."""
        if self.servers:
            with ThreadPoolExecutor(len(self.servers)) as threads:
                list(threads.map(lambda server: server.close(), self.servers))
        for limit in self.limits:
            limit.forget()

    def _open(self, entry: ToolConfig, where: str, args_where: str) -> list[AnyTool]:
        if entry.name is not None:
            try:
                found = self.find(entry.name)
            except UnknownPartError as error:
                raise UnknownPartError(f"{where}: {error}") from error
            made = (as_tool if self.connect else stand_in)(found, entry.args, args_where)
            return [Bounded(made, self._bounds(entry, where)) if _bounded(entry) else made]
        key = self._variable(entry.api_key_env, f"{where}.api_key_env")
        if not self.connect:
            return []
        try:
            return self._served(entry, key) if entry.server is not None else self._mcp(entry, key, where)
        except ConfigError as error:
            if str(error).startswith(f"{where}."):
                raise
            raise ConfigError(f"{where}: {error}") from error

    def _served(self, entry: ToolConfig, key: str | None) -> list[AnyTool]:
        limit = self._limit(entry, key)
        seconds = entry.timeout or SERVER_SECONDS
        patience = 2 * seconds if entry.retries is None else (entry.retries + 1) * (seconds + 8)
        client = ToolClient(
            entry.server, key, entry.concurrency or 64, seconds, max(120.0, patience), limit, retries=entry.retries
        )
        self.clients.append(client)
        return [_called(tool, entry) for tool in client.tools(entry.tools)]

    def _mcp(self, entry: ToolConfig, key: str | None, where: str) -> list[AnyTool]:
        from arborl.tools.mcp import McpServer

        asked = entry.mcp
        assert asked is not None
        passed = {name: self._variable(name, f"{where}.mcp.pass_env") or "" for name in asked.pass_env}
        server = McpServer(
            asked.url or asked.command,
            asked.env | passed,
            {"Authorization": f"Bearer {key}"} if key else None,
            entry.timeout or 30.0,
            asked.stateful,
            entry.tools,
            cwd=asked.cwd,
        )
        self.servers.append(server)
        bounds = self._bounds(entry, where)
        bounds.timeout = None  # the server's connection keeps it
        return [Bounded(tool, bounds, entry.prefix + tool.name) for tool in server.tools()]

    def _bounds(self, entry: ToolConfig, where: str) -> Bounds:
        try:
            limit = self._limit(entry, None)
        except ConfigError as error:
            raise ConfigError(f"{where}.limit: {error}") from error
        return Bounds(limit, entry.concurrency, entry.timeout, entry.retries or 0)

    def _limit(self, entry: ToolConfig, key: str | None) -> RateLimit | None:
        asked = entry.limit
        if asked is None:
            return None
        server = (asked.server or entry.server) if asked.scope == "cluster" else None
        own = key if server == entry.server else None
        limit = RateLimit(
            asked.per_minute, asked.burst, asked.name or f"tools of {entry.origin}", asked.scope, server, own
        )
        if self.connect:
            limit.check()
            self.limits.append(limit)
        return limit

    def _variable(self, name: str | None, where: str) -> str | None:
        """Its value, which goes where it must and nowhere else."""
        if name is None:
            return None
        if not os.environ.get(name):
            raise ConfigError(f"{where}: the environment has no {name}. Write: export {name}=…")
        return os.environ[name]


def _bounded(entry: ToolConfig) -> bool:
    return any(value is not None for value in (entry.limit, entry.concurrency, entry.timeout, entry.retries))


def _called(tool: AnyTool, entry: ToolConfig) -> AnyTool:
    return Bounded(tool, Bounds(), entry.prefix + tool.name) if entry.prefix else tool


def with_args(
    entries: Sequence[ToolConfig], args: Mapping[str, Mapping[str, Any]], where: str, known: Iterable[ToolConfig]
) -> list[tuple[ToolConfig, str, str]]:
    """Entries, with the arguments that `agent.tool_args` has for them, and where each and its arguments are written.

    Args:
        entries: of the run, or of a source.
        args: by the tool's name, or the last part of it.
        where: in front of the keys: empty for the run, `data.sources.math.` for a source.
        known: entries that the arguments may be for; those for other tools are a mistake.
    """
    if astray := [name for name in args if name not in names(known)]:
        raise ConfigError(f"{where}agent.tool_args.{astray[0]}: no such tool here. Write {where}tools=[{astray[0]}].")
    found = []
    for index, entry in enumerate(entries):
        place = f"{where}tools.{index}"
        written = bool(entry.args)
        more = ""
        called = next((name for name in (entry.name, short_name(entry.name or "")) if name in args), None)
        if called is not None:
            more = f"{where}agent.tool_args.{called}"
            if twice := [key for key in args[called] if key in entry.args]:
                raise ConfigError(f"{more}.{twice[0]}: is given in {place} too. Keep one.")
            entry = entry.model_copy(update={"args": {**entry.args, **args[called]}})
        found.append((entry, place, more if called is not None and not written else f"{place}.args"))
    return found


def names(entries: Iterable[ToolConfig]) -> set[str]:
    """All that the named tools among these may be called."""
    whole = [entry.name for entry in entries if entry.name is not None]
    return {*whole, *map(short_name, whole)}


def warn_of_variables(entries: Sequence[ToolConfig]) -> None:
    """Say which variables of other systems are set and do nothing."""
    for name, instead in ELSEWHERE.items() if entries else ():
        if os.environ.get(name):
            log.warning("%s is set in the environment and does nothing here. Write it with the tool: %s", name, instead)
