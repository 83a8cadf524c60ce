"""Repeated attempts with exponential backoff, and a circuit breaker for a server that fails repeatedly."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
BUSY_STATUS = (408, 409, 429, 500, 502, 503, 504)
"""HTTP statuses of a server that may answer later."""


def backoff_waits(retries: int | None, first: float, longest: float = math.inf, jitter: float = 0.0) -> Iterator[float]:
    """Seconds to wait after each failed attempt but the last: `first`, doubled each time up to `longest`.

    Args:
        retries: attempts after the first; None for no limit.
        jitter: share by which each wait varies at random.
    """
    for attempt in itertools.count() if retries is None else range(retries):
        yield min(first * 2 ** min(attempt, 30), longest) * random.uniform(1 - jitter, 1 + jitter)


async def retry(
    call: Callable[[], Awaitable[T]],
    waits: Iterator[float],
    again: Callable[[T], bool],
    errors: tuple[type[Exception], ...] = (),
) -> T:
    """The result of `call()`, repeated after each of `waits` while it raises one of `errors` or `again(result)`."""
    for wait in waits:
        try:
            if not again(result := await call()):
                return result
        except errors:
            pass
        await asyncio.sleep(wait)
    return await call()


def retry_sync(
    call: Callable[[], T],
    waits: Iterator[float],
    again: Callable[[T], bool],
    errors: tuple[type[Exception], ...] = (),
) -> T:
    """As `retry`, without an event loop."""
    for wait in waits:
        try:
            if not again(result := call()):
                return result
        except errors:
            pass
        time.sleep(wait)
    return call()


class CircuitBreaker:
    """Opens after several consecutive failures: then one caller at a time probes, with pauses; the others wait."""

    def __init__(
        self,
        failures: int = 5,
        pause: float = 0.25,
        longest: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.failures, self.first, self.longest, self.clock = failures, pause, longest, clock
        self._consecutive_failures = 0
        self._pause = pause
        self._next_probe = 0.0
        self._is_probing = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._consecutive_failures >= self.failures

    async def acquire(self) -> None:
        """Return when the caller may try. The caller bounds the wait (`asyncio.timeout`)."""
        while self.is_open:
            wait = self._next_probe - self.clock()
            if wait <= 0 and not self._is_probing:
                self._is_probing = True
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(max(wait, 0.01) if not self._is_probing else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def record_success(self) -> None:
        self._consecutive_failures, self._pause, self._is_probing = 0, self.first, False
        self._changed.set()

    def record_failure(self) -> None:
        self._consecutive_failures += 1
        self._is_probing = False
        if self.is_open:
            self._next_probe = self.clock() + self._pause
            self._pause = min(2 * self._pause, self.longest)
        self._changed.set()

    def cancel(self) -> None:
        """The caller stopped before the result was known."""
        self._is_probing = False
        self._changed.set()
