"""Keeps many callers from knocking at a door that does not open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Breaker:
    """After some failures in a row, lets one caller at a time try, with pauses; the others wait for its news.

    Example:
        await breaker.enter()       # at once while things go well
        breaker.worked()            # or breaker.failed()

    Args:
        failures: in a row, before it opens.
        pause: seconds before the first try after it opened; doubled with every failed one, up to `longest`.
        clock: tells the time; another one in tests.
    """

    def __init__(
        self,
        failures: int = 5,
        pause: float = 0.25,
        longest: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.failures, self.first, self.longest, self.clock = failures, pause, longest, clock
        self._row = 0
        self._pause = pause
        self._until = 0.0
        self._probing = False
        self._news = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether callers are held back."""
        return self._row >= self.failures

    async def enter(self) -> None:
        """Return when the caller may try. Bound the wait from outside (`asyncio.timeout`)."""
        while self.open:
            wait = self._until - self.clock()
            if wait <= 0 and not self._probing:
                self._probing = True
                return
            self._news.clear()
            try:
                async with asyncio.timeout(max(wait, 0.01) if not self._probing else None):
                    await self._news.wait()
            except TimeoutError:
                continue

    def worked(self) -> None:
        """The server answered, whatever it said."""
        self._row, self._pause, self._probing = 0, self.first, False
        self._news.set()

    def failed(self) -> None:
        """The server could not be reached, or was not itself."""
        self._row += 1
        self._probing = False
        if self.open:
            self._until = self.clock() + self._pause
            self._pause = min(2 * self._pause, self.longest)
        self._news.set()

    def left(self) -> None:
        """A caller that was let in gave up before it knew."""
        self._probing = False
        self._news.set()
