"""A counter that threads and event loops wait for together, in the order they came."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future


class Slots:
    """So many at a time, whoever asks: a plain thread, or any event loop.

    Example:
        slots = Slots(2)
        slots.take_sync()            # or `await slots.take()`
        slots.give()
    """

    def __init__(self, count: int):
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def take_sync(self) -> None:
        """Wait for a slot, blocking."""
        if (turn := self._ask()) is not None:
            turn.result()

    async def take(self) -> None:
        """Wait for a slot. Who is cancelled while waiting leaves it to the next."""
        turn = self._ask()
        if turn is None:
            return
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it had just been given
                self.give()
            raise

    def give(self) -> None:
        """Hand a slot to who has waited longest, or keep it."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        turn.set_result(None)

    def _ask(self) -> Future[None] | None:
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                return None
            turn: Future[None] = Future()
            self._waiting.append(turn)
            return turn
