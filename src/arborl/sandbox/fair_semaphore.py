"""A semaphore for threads and event loops, first come first served. Waiting does not count towards deadlines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from arborl.errors import paused_deadlines


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Statistics of waiting."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def __add__(self, other: WaitTimes) -> WaitTimes:
        return WaitTimes(self.count + other.count, self.seconds + other.seconds, max(self.longest, other.longest))


class FairSemaphore:
    """A counting semaphore for threads (`with`) and any event loop (`async with`)."""

    def __init__(self, count: int):
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._waits = WaitTimes()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take_wait_times(self) -> WaitTimes:
        with self._lock:
            waits, self._waits = self._waits, WaitTimes()
        return waits

    def __enter__(self) -> None:
        start = time.perf_counter()
        if (grant := self._request()) is not None:
            grant.result()
        self._record(time.perf_counter() - start)

    async def acquire(self) -> None:
        start, grant = time.perf_counter(), self._request()
        if grant is not None:
            try:
                with paused_deadlines():
                    await asyncio.wrap_future(grant)
            except asyncio.CancelledError:
                if not grant.cancel():  # already granted
                    self.release()
                raise
        self._record(time.perf_counter() - start)

    def release(self) -> None:
        with self._lock:
            while self._waiting:
                grant = self._waiting.popleft()
                if grant.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        grant.set_result(None)

    def __exit__(self, *error: object) -> None:
        self.release()

    __aenter__ = acquire

    async def __aexit__(self, *error: object) -> None:
        self.release()

    def _record(self, seconds: float) -> None:
        with self._lock:
            self._waits = self._waits + WaitTimes(1, seconds, seconds)

    def _request(self) -> Future[None] | None:
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                return None
            grant: Future[None] = Future()
            self._waiting.append(grant)
            return grant
