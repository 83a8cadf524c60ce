"""Sync reward functions in threads: a blocking function delays neither the event loop nor other rewards.

The deadline is that of the `boundary` around the call. A call that does not return is abandoned
(`arborl.tools.core.background_threads`). Many calls may wait at once, for example for a judge. Calls that compute
share one
interpreter lock: more at once would only exceed their deadlines. So few start, and more while the threads use little
CPU time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from arborl.errors import current_deadline, paused_deadlines
from arborl.tools.core.background_threads import run_in_thread

MIN_CONCURRENCY = 8
MAX_CONCURRENCY = 256
CHECK_SECONDS = 0.02
"""Time between two checks of the CPU time while calls wait."""
BUSY_CPU_SECONDS = 0.005
"""CPU time between two checks above which the calls compute. An absolute time: on an overloaded machine a check is late
and a computing call gets little."""
DEFAULT_SECONDS = 30.0
"""Time after which a call without a deadline counts as stuck."""
MAIN_THREAD = "signal only works in main thread"
MAIN_THREAD_ADVICE = (
    "Sync rewards run in threads. Write @arborl.reward(blocking=False), or `blocking: false` among the arguments of "
    "score_function: it then runs in the event loop of the run and must be fast."
)


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """The awaited result of `function(*args, **more)`; a sync function runs in a thread."""
    return await (function(*args, **more) if is_async(function) else call_in_thread(function, *args, **more))


async def call_in_thread(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """The result of a sync function, called in a thread; an awaitable result is awaited here."""
    concurrency = _concurrency.setdefault(asyncio.get_running_loop(), AdaptiveConcurrency())
    await concurrency.acquire()
    try:
        name, seconds = current_deadline() or (getattr(function, "__name__", type(function).__name__), DEFAULT_SECONDS)
        value = await run_in_thread(functools.partial(concurrency.measured, function, *args, **more), name, seconds)
    except ValueError as error:
        if MAIN_THREAD not in str(error):
            raise
        raise ValueError(f"{error}. {MAIN_THREAD_ADVICE}") from error
    finally:
        concurrency.release()
    return await value if inspect.isawaitable(value) else value


class AdaptiveConcurrency:
    """Limits the calls that run at once in one event loop: few, and more while they use little CPU time."""

    def __init__(self) -> None:
        self.num_running, self.limit = 0, MIN_CONCURRENCY
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.lock = threading.Lock()
        self.start_times: dict[int, float] = {}
        """Thread of a running call -> CPU time of the thread before the call."""
        self.finished_seconds = 0.0
        """CPU time of the finished calls."""
        self.last_seconds: float | None = None
        """CPU time at the last check; None if no check is scheduled."""

    async def acquire(self) -> None:
        """Wait for admission; deadlines around it are paused meanwhile."""
        if self.num_running < self.limit and not self.waiting:
            self.num_running += 1
            return
        admitted = asyncio.get_running_loop().create_future()
        self.waiting.append(admitted)
        self._schedule_check()
        try:
            with paused_deadlines():
                await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted at the same moment
                self.release()
            raise

    def release(self) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self.limit = MIN_CONCURRENCY
        self._admit()

    def measured(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """`function(*args, **more)`, with the CPU time of its thread."""
        thread = threading.get_ident()
        with self.lock:
            self.start_times[thread] = time.thread_time()
        try:
            return function(*args, **more)
        finally:
            with self.lock:
                self.finished_seconds += time.thread_time() - self.start_times.pop(thread)

    def _admit(self) -> None:
        while self.waiting and self.num_running < self.limit:
            admitted = self.waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self.num_running += 1

    def _schedule_check(self) -> None:
        if self.last_seconds is None:
            self.last_seconds = self._cpu_seconds()
            asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        """Raise the limit if the threads used little CPU time since the last check, else lower it."""
        assert self.last_seconds is not None
        used = self._cpu_seconds() - self.last_seconds
        is_idle = used < BUSY_CPU_SECONDS
        self.limit = min(MAX_CONCURRENCY, 2 * self.limit) if is_idle else max(MIN_CONCURRENCY, self.limit // 2)
        self.last_seconds = None
        self._admit()
        if self.waiting:
            self._schedule_check()

    def _cpu_seconds(self) -> float:
        """CPU time of all calls, including running ones where the system reports it (not on macOS)."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        with self.lock:  # no thread of `start_times` can end meanwhile
            if clock_of is None:
                return self.finished_seconds
            running = (time.clock_gettime(clock_of(thread)) - before for thread, before in self.start_times.items())
            return self.finished_seconds + sum(running)


_concurrency: WeakKeyDictionary[asyncio.AbstractEventLoop, AdaptiveConcurrency] = WeakKeyDictionary()
