"""Plain functions beside the event loop, and the threads of those that never came back.

A thread cannot be stopped from outside. What nobody waits for any more is left behind; how many are, and whose, is kept
here, so that a function that hangs every time cannot fill the machine with threads.
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

MOST = 32
"""Threads of one name that may hang before no more are begun for it."""
IDLE = 10.0
"""Seconds after which an idle thread ends."""


class TooManyStuck(RuntimeError):
    """So many calls of one kind hang that another is not begun."""


class LeftBehind:
    """Threads that somebody has stopped waiting for, by whose call they run.

    One is stuck when its call has taken longer than it may. A call that was given up earlier (its episode was
    cancelled) is none yet: it may be about to return.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: dict[object, tuple[str, float]] = {}
        self.full: set[str] = set()
        """Names whose calls are refused; each is told once."""

    def add(self, call: object, name: str, due: float) -> None:
        """Nobody waits for this call any more. `due`: when it should have been back, as `time.monotonic` tells it."""
        with self.lock:
            self.calls[call] = name, due

    def came_back(self, call: object) -> None:
        """The call has returned after all, or never was left."""
        with self.lock:
            self.calls.pop(call, None)

    def running(self) -> Counter[str]:
        """How many calls of each name have not returned, stuck or not."""
        with self.lock:
            return Counter(name for name, _ in self.calls.values())

    def stuck(self) -> Counter[str]:
        """How many calls of each name hang."""
        now = time.monotonic()
        with self.lock:
            return Counter(name for name, due in self.calls.values() if due <= now)

    def admit(self, name: str, instead: str = "") -> None:
        """Refuse another call of that name while too many hang.

        Args:
            name: whose call it is.
            instead: what may be done about it, for the error.
        """
        if not self.calls or self.stuck()[name] < MOST:  # the usual case looks at nothing
            self.full.discard(name)
            return
        words = f"{MOST} calls of {name} hang in threads that cannot be stopped, so this one was not begun.{instead}"
        if name not in self.full:
            self.full.add(name)
            log.warning("%s", words)
        raise TooManyStuck(words)


left_behind = LeftBehind()
"""Of `in_thread`, in this process."""


def stuck_calls(tool: str) -> int:
    """How many calls of that tool hang."""
    return left_behind.stuck()[f"tool {tool!r}"]


class DaemonThread:
    """A thread that runs one job after another, and ends when it has had none for `IDLE` seconds.

    Starting a thread takes four times as long as giving a job to one that is there.
    """

    idle: ClassVar[list[DaemonThread]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="arborl-idle", daemon=True)
        self.thread.start()

    @classmethod
    def run(cls, job: Callable[[], None], name: str) -> None:
        """Run the job in an idle thread, or in a new one."""
        with cls.lock:
            found = cls.idle.pop() if cls.idle else None
        found = found or cls()
        found.thread.name = name
        found.jobs.put(job)

    def _work(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=IDLE)
            except Empty:
                with self.lock:
                    if self in self.idle:
                        self.idle.remove(self)
                        return
                continue  # it was taken just now
            job()
            del job  # with what it refers to
            self.thread.name = "arborl-idle"
            with self.lock:
                self.idle.append(self)


def _forget_threads() -> None:
    DaemonThread.idle, DaemonThread.lock = [], threading.Lock()
    left_behind.calls, left_behind.lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)  # a forked process has none of these threads


async def in_thread(function: Callable[[], Any], whose: str = "", seconds: float = 30.0) -> Any:
    """`function()` in a daemon thread that runs nothing else meanwhile.

    Not in asyncio's pool: a few functions that never return would fill it, and leaving the event loop waits for it.

    Args:
        function: without arguments.
        whose: what a call that hangs is called; the function's name by default.
        seconds: what it may take before it is said to hang; whoever waits longer, or less, is free to.

    Raises:
        TooManyStuck: at once, while `MOST` calls of that name hang.
    """
    name = getattr(getattr(function, "func", function), "__name__", "tool")  # never its arguments: they may be long
    whose = whose or repr(name)
    left_behind.admit(whose)
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[None] = loop.create_future()
    results: list[tuple[Any, BaseException | None]] = []
    context = contextvars.copy_context()
    due, ended = time.monotonic() + seconds, False

    def settle(value: Any, error: BaseException | None) -> None:
        if not outcome.done():  # cancelled: the caller stopped waiting
            results.append((value, error))
            outcome.set_result(None)

    def work() -> None:
        nonlocal ended
        value, error = None, None
        try:
            value = context.run(function)
        except BaseException as raised:
            error = raised
        ended = True
        left_behind.came_back(outcome)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)
        del value, error  # this frame is in the error's traceback: what it refers to would stay until a collection

    DaemonThread.run(work, f"arborl-{name}")
    try:
        await outcome
    except asyncio.CancelledError:
        left_behind.add(outcome, whose, due)
        if ended:  # in this very moment
            left_behind.came_back(outcome)
        raise
    value, error = results.pop()
    try:
        if error is not None and not isinstance(error, Exception):  # SystemExit ends the thread it was raised in
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        if error is not None:
            raise error
        return value
    finally:
        del error  # the same of this frame
