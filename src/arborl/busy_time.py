"""Time during which at least one call was in progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType


class BusyTime:
    """Seconds during which at least one caller is inside, without paused time.

    Example:
        with busy_time:
            await engine.generate(...)
        busy_time.busy()      # since the last call
    """

    def __init__(self, after: Callable[[], None] = lambda: None):
        self.after = after
        """Called whenever a call ends."""
        self.inside, self.held = 0, False
        self.seconds, self.since = 0.0, time.perf_counter()

    def __enter__(self) -> None:
        if not self.inside:
            self._count()
        self.inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.inside == 1:
            self._count()
        self.inside -= 1
        self.after()

    def hold(self, held: bool) -> None:
        """Pause or resume the count: calls make no progress meanwhile."""
        self._count()
        self.held = held

    def busy(self) -> float:
        """Seconds since the last call."""
        self._count()
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _count(self) -> None:
        now = time.perf_counter()
        if self.inside and not self.held:
            self.seconds += now - self.since
        self.since = now
