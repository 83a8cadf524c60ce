"""Time during which at least one call was in progress."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyTime:
    """Seconds during which at least one caller is inside `with`, without paused time."""

    def __init__(self, after: Callable[[], None] = lambda: None):
        self.after = after
        """Called whenever a call ends."""
        self.inside, self.held = 0, False
        self.seconds, self.since = 0.0, time.perf_counter()

    def __enter__(self) -> None:
        if not self.inside:
            self._count()
        self.inside += 1

    def __exit__(self, *_: object) -> None:
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
