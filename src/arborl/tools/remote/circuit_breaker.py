"""Circuit breaker for a server that fails repeatedly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class CircuitBreaker:
    """Opens after several consecutive failures: then one caller at a time probes, with pauses; the others wait.

    Example:
        await breaker.acquire()             # returns at once while the breaker is closed
        breaker.record_success()            # or breaker.record_failure()

    Args:
        failures: consecutive failures that open it.
        pause: seconds before the first probe; doubled with every failed probe up to `longest`.
        clock: time source, for tests.
    """

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
        """The server responded, with any status."""
        self._consecutive_failures, self._pause, self._is_probing = 0, self.first, False
        self._changed.set()

    def record_failure(self) -> None:
        """The server did not respond or is not available."""
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
