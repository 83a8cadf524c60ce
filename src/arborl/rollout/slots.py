"""How many episodes are in play: as many as was said, or as many as the engine can serve."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

FIRST = 128
"""Episodes at once, where the engine does not say how many requests it can serve."""
LESS, PATIENCE = 0.9, 0.25
"""What the limit is multiplied by where the engine is crowded, and the seconds until it may be again."""


class Slots:
    """Lets so many in at a time, in the order they came.

    Without a fixed limit it follows the engine: it begins with what the engine can serve; with every answered model
    call that found no crowd the limit grows by one, as long as it is reached; where requests wait that the engine has
    no room for, it shrinks. Episodes that wait for their tools are no load, so slow tools lead to more episodes in
    play.

    Args:
        limit: how many; None follows the engine.
        crowded: whether the engine has requests it has no room for.
        first: the limit to begin with, where it follows the engine.
        most: the highest limit, where it follows the engine.

    Example:
        async with slots:
            await play()
    """

    def __init__(self, limit: int | None, crowded: Callable[[], bool], first: int = FIRST, most: float = math.inf):
        self.follows, self.limit = limit is None, float(limit or first)
        self.crowded, self.most = crowded, most
        self.inside, self.shrunk = 0, 0.0
        self.line: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self.inside < int(self.limit) and not self.line:
            self.inside += 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.line.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # let in and sent away in the same moment
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def look(self) -> None:
        """The engine has answered somebody: see whether it can serve more."""
        if not self.follows:
            return
        if not self.crowded():
            if self.inside >= int(self.limit):
                self.limit = min(self.limit + 1, self.most)
                self._let_in()
        elif time.monotonic() - self.shrunk > PATIENCE:
            self.limit = max(1.0, LESS * min(self.limit, self.inside))
            self.shrunk = time.monotonic()

    def _leave(self) -> None:
        self.inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self.line and self.inside < int(self.limit):
            first = self.line.popleft()
            if not first.done():  # else it has gone
                self.inside += 1
                first.set_result(None)
