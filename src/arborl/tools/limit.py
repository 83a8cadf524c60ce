"""A rate limit that holds over processes: at most `rate · t + burst` calls in any window of length t.

Grants are kept by a file of this machine (`host_limit.py`), or by a tool server that machines share (`cluster.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from arborl.errors import ConfigError
from arborl.tools.host_limit import HostBook, default_folder
from arborl.tools.host_limit import LimitTimeout as LimitTimeout


class Book(Protocol):
    """Where grants are kept: a file of this host, or a server."""

    async def acquire(self, timeout: float | None) -> float: ...

    def acquire_sync(self, timeout: float | None) -> float: ...

    def check(self) -> None: ...

    def forget(self) -> bool: ...


class RateLimit:
    """At most so many calls a minute, counted over every process that uses the same name.

    Example:
        limit = RateLimit(per_minute=600, burst=5, name="search")
        await limit.acquire()            # returns when the call may be made; retries acquire again
        limit.acquire_sync()             # the same without an event loop

    Args:
        per_minute: sustained rate.
        burst: calls that may be made at once after a pause.
        name: processes with the same name share one limit, and must agree on its numbers.
        scope: `host` coordinates the processes of one machine through a file; `cluster` asks a tool server
            (`arborl tools serve`), so that machines share one limit.
        server: address of that server; by default the environment's ARBORL_TOOL_SERVER.
        api_key: of that server; by default the environment's ARBORL_TOOL_API_KEY.
        folder: where host scope keeps its file; by default in memory, for this user.
    """

    def __init__(
        self,
        per_minute: float,
        burst: int = 1,
        name: str = "default",
        scope: Literal["host", "cluster"] = "host",
        server: str | None = None,
        api_key: str | None = None,
        folder: str | Path | None = None,
    ):
        if not per_minute > 0:
            raise ConfigError(f"RateLimit {name!r}: per_minute={per_minute}: give more than 0")
        if burst < 1 or burst != int(burst):
            raise ConfigError(f"RateLimit {name!r}: burst={burst}: give a whole number, 1 or more")
        if scope not in ("host", "cluster"):
            raise ConfigError(f"RateLimit {name!r}: scope={scope!r}: write 'host' or 'cluster'")
        self.per_minute, self.burst, self.name, self.scope = float(per_minute), int(burst), name, scope
        self._book: Book
        if scope == "host":
            if server is not None:
                raise ConfigError(f"RateLimit {name!r}: server={server!r} is for scope='cluster'")
            self._book = HostBook(self.per_minute, self.burst, name, Path(folder) if folder else default_folder())
        else:
            from arborl.tools.cluster import ServerBook

            self._book = ServerBook(self.per_minute, self.burst, name, server, api_key)

    async def acquire(self, timeout: float | None = None) -> float:
        """Wait until a call may be made; returns the time it was granted, by this machine's `time.monotonic()`.

        Args:
            timeout: raise `LimitTimeout`, without using up a call, rather than wait longer than this.
        """
        return await self._book.acquire(timeout)

    def acquire_sync(self, timeout: float | None = None) -> float:
        """As `acquire`, for callers without an event loop."""
        return self._book.acquire_sync(timeout)

    def check(self) -> None:
        """Raise ConfigError where it is in use with other numbers, or nobody answers who could grant anything."""
        self._book.check()

    def forget(self) -> bool:
        """Remove what is kept of it, unless calls were granted ahead of time; whether it is gone."""
        return self._book.forget()

    def __repr__(self) -> str:
        return (
            f"RateLimit(per_minute={self.per_minute:g}, burst={self.burst}, name={self.name!r}, scope={self.scope!r})"
        )
