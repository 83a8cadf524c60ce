"""A counter that threads and event loops wait for together, in the order they came; the deadlines of those that wait
stand still."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from arborl.errors import paused_deadlines


@dataclass(frozen=True, slots=True)
class Waits:
    """How long slots were waited for."""

    count: int = 0
    seconds: float = 0.0
    """All together."""
    longest: float = 0.0

    def __add__(self, other: Waits) -> Waits:
        return Waits(self.count + other.count, self.seconds + other.seconds, max(self.longest, other.longest))


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
        self._waits = Waits()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._waiting)

    def waits(self) -> Waits:
        """What the slots given since the last call were waited for."""
        with self._lock:
            waits, self._waits = self._waits, Waits()
        return waits

    def take_sync(self) -> None:
        """Wait for a slot, blocking."""
        start = time.perf_counter()
        if (turn := self._ask()) is not None:
            turn.result()
        self._count(time.perf_counter() - start)

    async def take(self) -> None:
        """Wait for a slot. Who is cancelled while waiting leaves it to the next."""
        start, turn = time.perf_counter(), self._ask()
        if turn is not None:
            try:
                with paused_deadlines():
                    await asyncio.wrap_future(turn)
            except asyncio.CancelledError:
                if not turn.cancel():  # it had just been given
                    self.give()
                raise
        self._count(time.perf_counter() - start)

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

    def _count(self, seconds: float) -> None:
        with self._lock:
            self._waits = self._waits + Waits(1, seconds, seconds)

    def _ask(self) -> Future[None] | None:
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                return None
            turn: Future[None] = Future()
            self._waiting.append(turn)
            return turn
