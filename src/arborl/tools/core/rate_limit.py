"""A rate limit over processes and machines: at most `rate * t + burst` calls in any window of length t.

The processes of one machine coordinate through a file (`HostRateLimiter`), machines through a tool server
(`ServerRateLimiter`).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import math
import os
import stat
import struct
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import httpx

from arborl.errors import ArborError, ConfigError

log = logging.getLogger(__name__)


class RateLimitTimeout(ArborError, TimeoutError):
    """The next call is further away than the caller's timeout."""


class RateLimit:
    """A rate limit that all processes with the same name share.

    Example:
        limit = RateLimit(per_minute=600, burst=5, name="search")
        await limit.acquire()            # returns when the call may be made; retries acquire again
        limit.acquire_sync()             # the same without an event loop

    Args:
        per_minute: sustained rate.
        burst: calls that may be made at once after a pause.
        name: processes with the same name share one limit and must use the same numbers.
        scope: `host` coordinates the processes of one machine through a file, `cluster` several machines through a tool
            server (`arborl tools serve`).
        server: address of that server; by default the environment variable ARBORL_TOOL_SERVER.
        api_key: its API key; by default the environment variable ARBORL_TOOL_API_KEY.
        folder: folder of the file with scope `host`; by default in memory, per user.
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
        self._limiter: HostRateLimiter | ServerRateLimiter
        if scope == "host":
            if server is not None:
                raise ConfigError(f"RateLimit {name!r}: server={server!r} is for scope='cluster'")
            path = Path(folder) if folder else default_limit_dir()
            self._limiter = HostRateLimiter(self.per_minute, self.burst, name, path)
        else:
            self._limiter = ServerRateLimiter(self.per_minute, self.burst, name, server, api_key)

    async def acquire(self, timeout: float | None = None) -> float:
        """Wait until a call may be made; returns the time of the grant in `time.monotonic()`."""
        return await self._limiter.acquire(timeout)

    def acquire_sync(self, timeout: float | None = None) -> float:
        """As `acquire`, without an event loop."""
        return self._limiter.acquire_sync(timeout)

    def check(self) -> None:
        """Raise ConfigError if the limit is in use with other numbers, or its server does not answer."""
        self._limiter.check()

    def remove(self) -> bool:
        """Delete the limit's file unless calls were granted ahead of time; whether it is deleted."""
        return self._limiter.remove()

    def __repr__(self) -> str:
        return f"RateLimit({self.per_minute:g}, {self.burst}, {self.name!r}, {self.scope!r})"


MAGIC = b"arborl-2"
CHECKSUM = struct.Struct("<8sI")  # file type, and a checksum of the rest
HEADER = struct.Struct("<16s5dI")
"""Boot id, calls per minute, burst, time of the last use, `_LimitState.next_grant`, `.last_ticket`, queue length."""
QUEUE_ENTRY = struct.Struct("<2d")
MAX_QUEUE = 4096  # maximum queue length; further callers poll until there is space

GRACE_SECONDS = 0.02  # A caller that is this late is passed by the next one
POLL_SECONDS, EXPIRY_SECONDS = 0.5, 1.0
"""Poll interval of a queued caller, and how late it may be before its queue entry expires."""
LOCK_RETRY_SECONDS = (0.0002, 0.05)  # first and longest wait between attempts to lock the file
LOCK_WARNING_SECONDS = 5.0


@dataclass(slots=True)
class _LimitState:
    """State that the processes share."""

    next_grant: float  # one interval after the last granted call; never before the present
    last_ticket: float = 0.0
    queue: dict[float, float] = field(default_factory=dict)  # ticket -> time at which its owner polls again


class HostRateLimiter:
    """A rate limit over the processes of one machine. A file stores the time of the next grant and the queue of waiting
    callers. Under the file's lock a caller joins the queue, gets its grant, or learns how long to sleep; it never
    sleeps inside the lock. A queue entry states when its owner polls again and expires if it does not. Killed processes
    therefore delay no other caller, and the bound depends on the granted calls alone."""

    def __init__(self, per_minute: float, burst: int, name: str, folder: Path):
        self.name, self.per_minute, self.burst = name, per_minute, burst
        self.interval = 60.0 / per_minute
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.limit"
        self._boot_id = _boot_id()

    async def acquire(self, timeout: float | None) -> float:
        waits = self._waits(timeout)
        try:
            while True:
                await asyncio.sleep(next(waits))
        except StopIteration as end:
            return float(end.value)
        finally:
            waits.close()

    def acquire_sync(self, timeout: float | None) -> float:
        waits = self._waits(timeout)
        try:
            while True:
                time.sleep(next(waits))
        except StopIteration as end:
            return float(end.value)
        finally:
            waits.close()

    def check(self) -> None:
        with self._opened() as descriptor:
            if _try_lock(descriptor):
                now = time.monotonic()
                self._write(descriptor, self._read(descriptor, now), now)

    def remove(self) -> bool:
        with self._opened() as descriptor, suppress(ConfigError):  # the file may belong to a limit with other numbers
            now = time.monotonic()
            if not _try_lock(descriptor) or (state := self._read(descriptor, now)).queue or state.next_grant > now:
                return False
            self.path.unlink(missing_ok=True)  # a new file has the same state
        return True

    def _waits(self, timeout: float | None) -> Generator[float, None, float]:
        """Yield times to sleep, then return the time of the grant. Closing it early leaves the queue."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        ticket, granted = None, False
        try:
            while True:
                descriptor = yield from self._lock(end)
                try:
                    ticket, granted, seconds = self._request(descriptor, ticket, end)
                finally:
                    os.close(descriptor)
                if granted:
                    return seconds
                yield seconds
        finally:
            if ticket is not None and not granted:
                self._leave(ticket)

    def _lock(self, end: float) -> Generator[float, None, int]:
        """Yield times to sleep, then return the open and locked file."""
        descriptor, start, warned = self._open(), time.monotonic(), False
        pause, longest = LOCK_RETRY_SECONDS
        try:
            while not _try_lock(descriptor) or not os.fstat(descriptor).st_nlink:
                if not os.fstat(descriptor).st_nlink:  # deleted meanwhile: open the new file
                    os.close(descriptor)
                    descriptor = self._open()
                    continue
                now = time.monotonic()
                if now >= end:
                    raise RateLimitTimeout(f"RateLimit {self.name!r}: another process holds the lock of {self.path}")
                if now - start > LOCK_WARNING_SECONDS and not warned:
                    log.warning(
                        "RateLimit %r: another process holds the lock of %s for more than %g s",
                        self.name, self.path, LOCK_WARNING_SECONDS,
                    )  # fmt: skip
                    warned = True
                yield min(pause, max(end - now, 0.0))
                pause = min(2 * pause, longest)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = self._open()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _request(self, descriptor: int, ticket: float | None, end: float) -> tuple[float | None, bool, float]:
        """The caller's ticket, whether it was granted, and the time of the grant or the seconds to sleep."""
        now = time.monotonic()
        state = self._read(descriptor, now)
        state.queue = {one: back for one, back in state.queue.items() if back + EXPIRY_SECONDS >= now or one == ticket}
        before = sum(one < ticket for one in state.queue) if ticket is not None else len(state.queue)
        due = max(now, state.next_grant) + (before + 1 - self.burst) * self.interval
        left = max(end - now, 0.0)
        if due - now > left + (0.0 if ticket is None else EXPIRY_SECONDS):
            raise RateLimitTimeout(
                f"RateLimit {self.name!r}: the next call is {due - now:.1f} s away, the timeout {left:.3g} s"
            )
        if ticket is None and len(state.queue) < MAX_QUEUE:
            ticket = state.last_ticket = state.last_ticket + 1
        # Wait a little for earlier callers that are about to poll; late ones are passed.
        coming = sum(
            abs(back - now) <= GRACE_SECONDS and (ticket is None or one < ticket) for one, back in state.queue.items()
        )
        grace = min(coming, 8) * min(self.interval, GRACE_SECONDS)
        free = state.next_grant + (1 - self.burst) * self.interval + grace
        if granted := free <= now and ticket is not None:
            state.queue.pop(ticket, None)
            state.next_grant = max(now, state.next_grant) + self.interval
        poll = POLL_SECONDS * (1 + len(state.queue) / 64)  # the longer the queue, the rarer the polls
        sleep = min(max(due, free) - now, poll) if ticket is not None else poll
        if ticket is not None and not granted:
            state.queue[ticket] = now + sleep
        self._write(descriptor, state, now)
        return ticket, granted, now if granted else sleep

    def _leave(self, ticket: float) -> None:
        """Remove a ticket from the queue. If the file is locked, the entry expires."""
        with self._opened() as descriptor:
            for _ in range(3):
                if _try_lock(descriptor):
                    state = self._read(descriptor, time.monotonic())
                    if state.queue.pop(ticket, None) is not None:
                        self._write(descriptor, state, time.monotonic())
                    return
                time.sleep(LOCK_RETRY_SECONDS[0])

    def _write(self, descriptor: int, state: _LimitState, now: float) -> None:
        numbers = (self.per_minute, self.burst, now, state.next_grant, state.last_ticket, len(state.queue))
        body = HEADER.pack(self._boot_id, *numbers) + b"".join(QUEUE_ENTRY.pack(*one) for one in state.queue.items())
        os.pwrite(descriptor, CHECKSUM.pack(MAGIC, zlib.crc32(body)) + body, 0)

    def _read(self, descriptor: int, now: float) -> _LimitState:
        """The file's state; a new state for an empty file, one of an earlier boot, or a damaged one."""
        data = os.pread(descriptor, CHECKSUM.size + HEADER.size + MAX_QUEUE * QUEUE_ENTRY.size, 0)
        if not data:
            return _LimitState(now)
        try:
            boot_id, per_minute, burst, used, state = unpack_state(data)
            if boot_id != self._boot_id:
                return _LimitState(now)
            if (per_minute, burst) != (self.per_minute, self.burst):
                return self._replace_old_limit(per_minute, burst, used, state, now)
            latest_poll = now + POLL_SECONDS * (1 + MAX_QUEUE / 64) + 1
            if used > now + 1 or state.next_grant > now + self.burst * self.interval + 1e-3:
                raise ValueError("its times are in the future")
            if any(ticket > state.last_ticket or back > latest_poll for ticket, back in state.queue.items()):
                raise ValueError("its queue is invalid")
        except ValueError as error:
            log.warning("RateLimit %r: %s is damaged (%s) and is reset", self.name, self.path, error)
            return _LimitState(now + (self.burst - 1) * self.interval)  # as after a full burst: the bound holds
        return state

    def _replace_old_limit(
        self, per_minute: float, burst: float, used: float, state: _LimitState, now: float
    ) -> _LimitState:
        """A new state if a limit with other numbers is unused for a minute, else ConfigError."""
        if not (per_minute > 0 and burst >= 1 and used <= now + 1):
            raise ValueError("its numbers are invalid")
        if state.next_grant < now and used < now - 60:
            return _LimitState(now)
        raise ConfigError(
            f"RateLimit {self.name!r}: in use with per_minute={per_minute:g} and burst={burst:g}, here "
            f"{self.per_minute:g} and {self.burst}. Write the same numbers everywhere, or another name."
        )


def unpack_state(data: bytes) -> tuple[bytes, float, float, float, _LimitState]:
    """Boot id, calls per minute, burst, last use and state of a file; ValueError for a damaged file."""
    if len(data) < CHECKSUM.size + HEADER.size:
        raise ValueError("it is too short")
    magic, checksum = CHECKSUM.unpack_from(data)
    boot_id, per_minute, burst, used, next_grant, last_ticket, count = HEADER.unpack_from(data, CHECKSUM.size)
    size = CHECKSUM.size + HEADER.size + min(count, MAX_QUEUE) * QUEUE_ENTRY.size
    body = data[CHECKSUM.size : size]
    if magic != MAGIC or count > MAX_QUEUE or len(data) < size or zlib.crc32(body) != checksum:
        raise ValueError("its checksum is wrong")
    queue = dict(QUEUE_ENTRY.iter_unpack(body[HEADER.size :]))
    if not all(map(math.isfinite, (per_minute, burst, used, next_grant, last_ticket, *queue, *queue.values()))):
        raise ValueError("it contains a number that is not finite")
    return boot_id, per_minute, burst, used, _LimitState(next_grant, last_ticket, queue)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def default_limit_dir() -> Path:
    return user_runtime_dir() / "limits"


def user_runtime_dir() -> Path:
    """A private folder of this user, in memory if possible. (TMPDIR differs between jobs of one machine.)"""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    folder = base / f"arborl-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise ConfigError(f"{folder} is not private to this user: remove it.")
    return folder


def _boot_id() -> bytes:
    """Id of the machine's boot: `time.monotonic()` restarts with each."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:16]
    except OSError:
        return b"unknown boot id."


REQUEST_SECONDS = 20.0  # longest wait within one request; a caller that must wait longer repeats it
SILENCE_SECONDS = 120.0  # RateLimitTimeout after this time without any response


class ServerRateLimiter:
    """A rate limit of a tool server. While the server does not answer, no call is granted."""

    def __init__(self, per_minute: float, burst: int, name: str, server: str | None, api_key: str | None):
        from arborl.tools.remote.tool_protocol import bearer_header

        server = server or os.environ.get("ARBORL_TOOL_SERVER")
        if not server:
            raise ConfigError(f"RateLimit {name!r}: scope='cluster' needs server='http://HOST:PORT'")
        key = api_key if api_key is not None else os.environ.get("ARBORL_TOOL_API_KEY")
        self.name, self.url = name, f"{server.rstrip('/')}/limit"
        self._headers = bearer_header(key)
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()
        self._request = {"name": name, "per_minute": per_minute, "burst": burst}

    async def acquire(self, timeout: float | None) -> float:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = self._client()
        return await self._acquire(self._clients[loop], timeout)

    def acquire_sync(self, timeout: float | None) -> float:
        async def acquire() -> float:
            async with self._client() as client:
                return await self._acquire(client, timeout)

        return asyncio.run(acquire())

    def check(self) -> None:
        try:  # it may use up one call
            response = httpx.post(self.url, json={**self._request, "timeout": 0.0}, headers=self._headers, timeout=30)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"RateLimit {self.name!r}: no tool server answers at {self.url} ({type(error).__name__}: {error}). "
                "Start one: arborl tools serve --tools calculator"
            ) from error
        self._is_granted(response)

    def remove(self) -> bool:
        return False  # the server owns the limit

    def _client(self) -> httpx.AsyncClient:
        every_caller = httpx.Limits(max_connections=None)  # each waiting caller holds a connection
        return httpx.AsyncClient(headers=self._headers, timeout=REQUEST_SECONDS + 10, limits=every_caller)

    async def _acquire(self, client: httpx.AsyncClient, timeout: float | None) -> float:
        now = time.monotonic()
        end, silent_until = now + (math.inf if timeout is None else timeout), now + SILENCE_SECONDS
        while True:
            seconds = min(max(end - time.monotonic(), 0.0), REQUEST_SECONDS)
            try:
                response = await client.post(self.url, json={**self._request, "timeout": seconds})
            except httpx.HTTPError as error:
                status, reason = 0, str(error) or type(error).__name__
            else:
                status, reason = response.status_code, response.text
                if self._is_granted(response):
                    return time.monotonic()
            if status in (200, 429):
                silent_until = time.monotonic() + SILENCE_SECONDS
            left = min(end, silent_until) - time.monotonic()
            if left <= 0:
                raise RateLimitTimeout(f"RateLimit {self.name!r}: no grant from {self.url} in time ({reason[:200]})")
            await asyncio.sleep(min(0.02 if status == 200 else 0.5, left))  # bounded rate if the server does not wait

    def _is_granted(self, response: httpx.Response) -> bool:
        if response.status_code in (401, 403, 404, 409, 422):
            raise ConfigError(f"RateLimit {self.name!r}: the tool server at {self.url}: {response.text[:300]}")
        try:
            answer = response.json() if response.status_code == 200 else {}
        except ValueError:  # not a tool server
            answer = {}
        return isinstance(answer, dict) and answer.get("granted") is True
