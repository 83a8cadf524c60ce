"""Plain functions in threads, and a count of those that hang.

A thread cannot be stopped. Calls that are no longer awaited are counted by name, so that a function that always hangs
cannot exhaust the machine's threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

log = logging.getLogger(__name__)

MAX_HANGING_CALLS = 32  # maximum number of hanging calls of one name; further calls are refused
IDLE_SECONDS = 10.0


class TooManyHangingCalls(RuntimeError):
    """Too many calls of one name hang; a new call was refused."""


class AbandonedCalls:
    """Calls in threads that are no longer awaited, by name. A call hangs when its deadline has passed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: dict[object, tuple[str, float]] = {}
        self.full: set[str] = set()  # names whose calls are refused; each is logged once

    def add(self, call: object, name: str, due: float) -> None:
        """Register a call that is no longer awaited. `due`: its deadline in `time.monotonic()`."""
        with self.lock:
            self.calls[call] = name, due

    def remove(self, call: object) -> None:
        with self.lock:
            self.calls.pop(call, None)

    def running(self) -> Counter[str]:
        with self.lock:
            return Counter(name for name, _ in self.calls.values())

    def hanging(self) -> Counter[str]:
        now = time.monotonic()
        with self.lock:
            return Counter(name for name, due in self.calls.values() if due <= now)

    def admit(self, name: str, advice: str = "") -> None:
        """Raise TooManyHangingCalls while too many calls of that name hang. `advice` is appended to the message."""
        if not self.calls or self.hanging()[name] < MAX_HANGING_CALLS:
            self.full.discard(name)
            return
        words = f"{MAX_HANGING_CALLS} calls of {name} hang in threads; this call was refused.{advice}"
        if name not in self.full:
            self.full.add(name)
            log.warning("%s", words)
        raise TooManyHangingCalls(words)


abandoned_calls = AbandonedCalls()


def num_hanging_calls(tool: str) -> int:
    return abandoned_calls.hanging()[f"tool {tool!r}"]


class DaemonThread:
    """A reusable thread; it ends after `IDLE_SECONDS` without a job. Starting a thread takes four times as long."""

    idle: ClassVar[list[DaemonThread]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="arborl-idle", daemon=True)
        self.thread.start()

    @classmethod
    def run(cls, job: Callable[[], None], name: str) -> None:
        with cls.lock:
            worker = cls.idle.pop() if cls.idle else None
        worker = worker or cls()
        worker.thread.name = name
        worker.jobs.put(job)

    def _work(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=IDLE_SECONDS)
            except Empty:
                with self.lock:
                    if self in self.idle:
                        self.idle.remove(self)
                        return
                continue  # it was taken meanwhile
            job()
            del job  # and its references
            self.thread.name = "arborl-idle"
            with self.lock:
                self.idle.append(self)


def _reset_after_fork() -> None:
    DaemonThread.idle, DaemonThread.lock = [], threading.Lock()
    abandoned_calls.calls, abandoned_calls.lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)  # a forked process has none of these threads


async def run_in_thread(function: Callable[[], Any], name: str = "", seconds: float = 30.0) -> Any:
    """Run `function()` in a daemon thread; TooManyHangingCalls if `MAX_HANGING_CALLS` calls of that name hang.
    asyncio's thread pool is not used: functions that never return would fill it and block the end of the event loop. An
    abandoned call counts as hanging after `seconds`; the call itself has no timeout."""
    function_name = getattr(getattr(function, "func", function), "__name__", "tool")
    name = name or repr(function_name)
    abandoned_calls.admit(name)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    results: list[tuple[Any, BaseException | None]] = []
    context = contextvars.copy_context()
    due, ended = time.monotonic() + seconds, False

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():  # the caller was cancelled
            results.append((value, error))
            done.set_result(None)

    def work() -> None:
        nonlocal ended
        value, error = None, None
        try:
            value = context.run(function)
        except BaseException as raised:
            error = raised
        ended = True
        abandoned_calls.remove(done)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)
        del value, error  # this frame is in the error's traceback: break the reference cycle

    DaemonThread.run(work, f"arborl-{function_name}")
    try:
        await done
    except asyncio.CancelledError:
        abandoned_calls.add(done, name, due)
        if ended:  # it returned meanwhile
            abandoned_calls.remove(done)
        raise
    value, error = results.pop()
    try:
        if error is not None and not isinstance(error, Exception):  # such as SystemExit
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        if error is not None:
            raise error
        return value
    finally:
        del error  # break the reference cycle
