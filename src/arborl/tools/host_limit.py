"""A rate limit over the processes of one machine: a file holds what was granted, and who waits.

A file holds when the next call may be made, and the queue of those who wait for it. Under the file's lock a caller
joins the queue, is granted its call, or learns how long to sleep; nobody sleeps inside the lock, and nobody waits for
it without looking up. A place in the queue says when its owner will be back, and is given up if it does not come. So
those who were killed while they waited hold up nobody, and the bound is kept by what was granted alone.
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
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from arborl.errors import ArborError, ConfigError

log = logging.getLogger(__name__)

MAGIC = b"arborl-2"
SUM = struct.Struct("<8sI")
"""The kind of file, and a checksum of all that follows."""
HEAD = struct.Struct("<16s5dI")
"""Boot, calls a minute, burst, time of the last use, `Shared.grant`, `Shared.asked`, size of the queue."""
PLACE = struct.Struct("<2d")
MOST_WAITING = 4096
"""Places in the queue; who comes later looks again until there is one."""

GRACE = 0.02
"""Seconds that a caller who was to go first may be late, before the next one goes ahead of it."""
PATIENCE, LATE = 0.5, 1.0
"""Seconds between two looks at the queue, and how late its owner may be before a place is given up."""
PAUSES = (0.0002, 0.05)
"""Seconds between tries of a lock that another holds: the first, and the longest."""
HELD = 5.0
"""Seconds after which somebody who holds the lock is reported."""


@dataclass(slots=True)
class Shared:
    """What the processes share."""

    grant: float
    """One interval behind the last call that was granted, and never behind the present."""
    asked: float = 0.0
    """The last ticket given out."""
    queue: dict[float, float] = field(default_factory=dict)
    """Tickets of those who wait -> when they will be back."""


class LimitTimeout(ArborError, TimeoutError):
    """The wait for a grant was longer than the caller would wait."""


class HostBook:
    """The book of one limit, in a file that every process of this user opens."""

    def __init__(self, per_minute: float, burst: int, name: str, folder: Path):
        self.name, self.per_minute, self.burst = name, per_minute, burst
        self.interval = 60.0 / per_minute
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.limit"
        self._boot = boot_id()

    async def acquire(self, timeout: float | None) -> float:
        steps = self._steps(timeout)
        try:
            while True:
                await asyncio.sleep(next(steps))
        except StopIteration as end:
            return float(end.value)
        finally:
            steps.close()

    def acquire_sync(self, timeout: float | None) -> float:
        steps = self._steps(timeout)
        try:
            while True:
                time.sleep(next(steps))
        except StopIteration as end:
            return float(end.value)
        finally:
            steps.close()

    def check(self) -> None:
        descriptor, now = self._open(), time.monotonic()
        try:
            if _locked(descriptor):
                self._write(descriptor, self._read(descriptor, now), now)
        finally:
            os.close(descriptor)

    def forget(self) -> bool:
        descriptor, now = self._open(), time.monotonic()
        try:
            if not _locked(descriptor):
                return False
            state = self._read(descriptor, now)
            if state.queue or state.grant > now:
                return False
            self.path.unlink(missing_ok=True)  # a new file would say the same
        except ConfigError:
            pass  # in use with other numbers: the file is theirs
        finally:
            os.close(descriptor)
        return True

    def _steps(self, timeout: float | None) -> Generator[float, None, float]:
        """What to sleep, again and again, until it returns the time of the grant. Closed early, it leaves the queue."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        ticket, granted = None, False
        try:
            while True:
                descriptor = yield from self._lock(end)
                try:
                    ticket, granted, answer = self._ask(descriptor, ticket, end)
                finally:
                    os.close(descriptor)
                if granted:
                    return answer
                yield answer
        finally:
            if ticket is not None and not granted:
                self._leave(ticket)

    def _lock(self, end: float) -> Generator[float, None, int]:
        """The open file, locked. Whoever holds the lock meanwhile, this process goes on with its other work."""
        descriptor, began, told = self._open(), time.monotonic(), False
        pause, longest = PAUSES
        try:
            while not _locked(descriptor) or not os.fstat(descriptor).st_nlink:
                if not os.fstat(descriptor).st_nlink:  # forgotten meanwhile: others count in a new file
                    os.close(descriptor)
                    descriptor = self._open()
                    continue
                now = time.monotonic()
                if now >= end:
                    raise LimitTimeout(f"RateLimit {self.name!r}: another process holds the lock of {self.path}")
                if now - began > HELD and not told:
                    log.warning("RateLimit %r: another process holds the lock of %s for long", self.name, self.path)
                    told = True
                yield min(pause, max(end - now, 0.0))
                pause = min(2 * pause, longest)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _ask(self, descriptor: int, ticket: float | None, end: float) -> tuple[float | None, bool, float]:
        """The ticket, whether it was granted, and when; or how long to sleep before asking again."""
        now = time.monotonic()
        state = self._read(descriptor, now)
        state.queue = {one: back for one, back in state.queue.items() if back + LATE >= now or one == ticket}
        before = sum(one < ticket for one in state.queue) if ticket is not None else len(state.queue)
        due = max(now, state.grant) + (before + 1 - self.burst) * self.interval
        left = max(end - now, 0.0)
        if due - now > left + (0.0 if ticket is None else LATE):
            raise LimitTimeout(f"RateLimit {self.name!r}: the next call is {due - now:.1f} s away, not {left:.3g} s")
        if ticket is None and len(state.queue) < MOST_WAITING:
            ticket = state.asked = state.asked + 1
        # Those before who are about to come are waited for, a little; who is late, or said to come later, is passed.
        coming = sum(abs(back - now) <= GRACE and (ticket is None or one < ticket) for one, back in state.queue.items())
        free = state.grant + (1 - self.burst) * self.interval + min(coming, 8) * min(self.interval, GRACE)
        if granted := free <= now and ticket is not None:
            state.queue.pop(ticket, None)
            state.grant = max(now, state.grant) + self.interval
        looks = PATIENCE * (1 + len(state.queue) / 64)  # the more wait, the less often each of them looks
        sleep = min(max(due, free) - now, looks) if ticket is not None else looks
        if ticket is not None and not granted:
            state.queue[ticket] = now + sleep
        self._write(descriptor, state, now)
        return ticket, granted, now if granted else sleep

    def _leave(self, ticket: float) -> None:
        """A caller that stopped waiting leaves its place. If the lock is held just now, the place lapses by itself."""
        descriptor = self._open()
        try:
            for _ in range(3):
                if _locked(descriptor):
                    state = self._read(descriptor, time.monotonic())
                    if state.queue.pop(ticket, None) is not None:
                        self._write(descriptor, state, time.monotonic())
                    return
                time.sleep(PAUSES[0])
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, state: Shared, now: float) -> None:
        about = (self._boot, self.per_minute, self.burst, now, state.grant, state.asked, len(state.queue))
        body = HEAD.pack(*about) + b"".join(PLACE.pack(*place) for place in state.queue.items())
        os.pwrite(descriptor, SUM.pack(MAGIC, zlib.crc32(body)) + body, 0)

    def _read(self, descriptor: int, now: float) -> Shared:
        """What the file says. One from before the machine was started, or left long ago, says nothing."""
        data = os.pread(descriptor, SUM.size + HEAD.size + MOST_WAITING * PLACE.size, 0)
        if not data:
            return Shared(now)
        try:
            boot, per_minute, burst, used, state = unpack(data)
            if boot != self._boot:
                return Shared(now)
            if (per_minute, burst) != (self.per_minute, self.burst):
                return self._taken_over(per_minute, burst, used, state, now)
            self._check(used, state, now)
        except ValueError as error:
            log.warning("RateLimit %r: %s is damaged (%s) and begun anew", self.name, self.path, error)
            return Shared(now + (self.burst - 1) * self.interval)  # as if its burst was used up: the bound is kept
        return state

    def _check(self, used: float, state: Shared, now: float) -> None:
        """Refuse what no process can have written, however long one would have to wait to find that out."""
        soon = now + PATIENCE * (1 + MOST_WAITING / 64) + 1
        if used > now + 1 or state.grant > now + self.burst * self.interval + 1e-3:
            raise ValueError("its times are in the future")
        if any(ticket > state.asked or back > soon for ticket, back in state.queue.items()):
            raise ValueError("its queue makes no sense")

    def _taken_over(self, per_minute: float, burst: float, used: float, state: Shared, now: float) -> Shared:
        if not (per_minute > 0 and burst >= 1 and used <= now + 1):
            raise ValueError("its numbers make no sense")
        if state.grant < now and used < now - 60:
            return Shared(now)
        raise ConfigError(
            f"RateLimit {self.name!r}: in use with per_minute={per_minute:g} and burst={burst:g}, here "
            f"{self.per_minute:g} and {self.burst}. Write the same numbers everywhere, or another name."
        )


def unpack(data: bytes) -> tuple[bytes, float, float, float, Shared]:
    """Boot, calls a minute, burst, last use and state, from a file's bytes; ValueError for what is no such file."""
    if len(data) < SUM.size + HEAD.size:
        raise ValueError("it is cut off")
    magic, check = SUM.unpack_from(data)
    boot, per_minute, burst, used, grant, asked, count = HEAD.unpack_from(data, SUM.size)
    size = SUM.size + HEAD.size + min(count, MOST_WAITING) * PLACE.size
    body = data[SUM.size : size]
    if magic != MAGIC or count > MOST_WAITING or len(data) < size or zlib.crc32(body) != check:
        raise ValueError("its checksum is wrong")
    queue = dict(PLACE.iter_unpack(body[HEAD.size :]))
    numbers = (per_minute, burst, used, grant, asked, *queue, *queue.values())
    if not all(map(math.isfinite, numbers)):
        raise ValueError("it holds what is no number")
    return boot, per_minute, burst, used, Shared(grant, asked, queue)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
