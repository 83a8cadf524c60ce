"""A rate limit that holds over processes: at most `rate · t + burst` calls in any window of length t.

Two steps. Under a file lock a caller *reserves* the next free time, in the order of asking, and sleeps outside the lock
until then. Back awake it takes the lock again and is *granted*: the book of grants holds the times at which callers
really went ahead, so callers that overslept together are still let through one after another.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from arborl.errors import ArborError, ConfigError

STATE = struct.Struct("<16s7d")
"""Boot of the machine, calls a minute, burst, time of the last use, then the fields of `State`."""


GRACE = 0.02
"""Seconds that a caller who was to go first may be late, before the next one goes ahead of it."""


@dataclass(slots=True)
class State:
    """What the processes share."""

    reserve: float
    """Where the next caller queues: one interval later for every caller, never behind the present."""
    grant: float
    """As `reserve`, moved on only when a caller really goes ahead."""
    asked: float = 0.0
    """The last ticket given out."""
    served: float = 0.0
    """The highest ticket that went ahead."""


class LimitTimeout(ArborError, TimeoutError):
    """The wait for a grant was longer than the caller would wait."""


class Book(Protocol):
    """Where grants are kept: a file of this host, or a server."""

    async def acquire(self, timeout: float | None) -> float: ...

    def acquire_sync(self, timeout: float | None) -> float: ...

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

    def forget(self) -> bool:
        """Remove what is kept of it, unless calls were granted ahead of time; whether it is gone."""
        return self._book.forget()

    def __repr__(self) -> str:
        return (
            f"RateLimit(per_minute={self.per_minute:g}, burst={self.burst}, name={self.name!r}, scope={self.scope!r})"
        )


class HostBook:
    """The book of one limit, in a file that every process of this user opens."""

    def __init__(self, per_minute: float, burst: int, name: str, folder: Path):
        self.name, self.per_minute, self.burst = name, per_minute, burst
        self.interval = 60.0 / per_minute
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.limit"
        self._boot = boot_id()

    async def acquire(self, timeout: float | None) -> float:
        ticket, due = self._reserve(timeout)
        try:
            while True:
                now = time.monotonic()
                if due > now:
                    await asyncio.sleep(due - now)
                granted, due = self._grant(ticket)
                if granted is not None:
                    return granted
        except asyncio.CancelledError:
            self._give_back()
            raise

    def acquire_sync(self, timeout: float | None) -> float:
        ticket, due = self._reserve(timeout)
        try:
            while True:
                now = time.monotonic()
                if due > now:
                    time.sleep(due - now)
                granted, due = self._grant(ticket)
                if granted is not None:
                    return granted
        except BaseException:  # KeyboardInterrupt in the sleep
            self._give_back()
            raise

    def _reserve(self, timeout: float | None) -> tuple[float, float]:
        """A ticket, and the time at which to ask for the grant: one interval behind whoever asked last."""
        with self._locked() as state:
            now = time.monotonic()
            ahead = max(now, state.reserve) + self.interval
            due = ahead - self.burst * self.interval
            if timeout is not None and due - now > timeout:
                raise LimitTimeout(
                    f"RateLimit {self.name!r}: the next call is {due - now:.1f} s away, not {timeout:g} s"
                )
            state.reserve = ahead
            state.asked += 1
            return state.asked, due

    def _grant(self, ticket: float) -> tuple[float | None, float]:
        """The time of the grant, or None and when to ask again: behind those who asked before and still wait."""
        with self._locked() as state:
            now = time.monotonic()
            before = min(max(ticket - state.served - 1, 0), 8)  # bounded: some of them may have died waiting
            due = state.grant + (1 - self.burst) * self.interval + before * min(self.interval, GRACE)
            if due > now:
                return None, due
            state.grant = max(now, state.grant) + self.interval
            state.reserve = max(state.reserve, state.grant)  # who overslept moves those that come after, not the bound
            state.served = max(state.served, ticket)
            return now, now

    def _give_back(self) -> None:
        """A caller that stopped waiting leaves its turn to the others; grants keep the bound either way."""
        with self._locked() as state:
            state.reserve = max(state.reserve - self.interval, state.grant)
            state.served = min(state.served + 1, state.asked)

    def forget(self) -> bool:
        try:
            with self._locked() as state:
                if max(state.reserve, state.grant) > time.monotonic():
                    return False
                self.path.unlink(missing_ok=True)  # a new file would say the same
        except ConfigError:
            pass  # in use with other numbers: the file is theirs
        return True

    @contextmanager
    def _locked(self) -> Iterator[State]:
        """The state, read and written back under the lock. Held for microseconds: nobody sleeps inside."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            state = self._read(os.pread(descriptor, STATE.size, 0))
            yield state
            about = (self._boot, self.per_minute, self.burst, time.monotonic())
            os.pwrite(descriptor, STATE.pack(*about, state.reserve, state.grant, state.asked, state.served), 0)
        finally:
            os.close(descriptor)

    def _read(self, data: bytes) -> State:
        """What the file says. One from before the machine was started, or left long ago, says nothing."""
        now = time.monotonic()
        if len(data) < STATE.size:
            return State(now, now)
        boot, per_minute, burst, used, *rest = STATE.unpack(data)
        state = State(*rest)
        if boot != self._boot:
            return State(now, now)
        if (per_minute, burst) != (self.per_minute, self.burst):
            if max(state.reserve, state.grant) < now and used < now - 60:
                return State(now, now)
            raise ConfigError(
                f"RateLimit {self.name!r}: in use with per_minute={per_minute:g} and burst={burst:g}, here "
                f"{self.per_minute:g} and {self.burst}. Write the same numbers everywhere, or another name."
            )
        return state


def default_folder() -> Path:
    """In memory where the system has such a folder: TMPDIR differs between jobs of one host, this does not."""
    return private_folder() / "limits"


def private_folder() -> Path:
    """A folder of this user's for what processes share and a restart of the machine may take."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    folder = base / f"arborl-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    about = folder.lstat()
    if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o022:
        raise ConfigError(f"{folder} is not this user's alone: remove it.")
    return folder


def boot_id() -> bytes:
    """Tells one start of the machine from another, since `time.monotonic()` begins anew with each."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:16]
    except OSError:
        return b"unknown boot id."
