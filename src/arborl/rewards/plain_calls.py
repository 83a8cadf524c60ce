"""Plain functions of rewards in threads: one that blocks holds up neither the event loop nor another reward.

The deadline is that of the `boundary` around the call, and a call that does not return is left behind under its name
(`arborl.tools.threads`). How many run at the same time depends on what they do. Those that wait (for a judge's answer,
say) may be many. Those that compute share one interpreter lock: more of them at once finish no earlier, but all run
into their deadlines. So few are started, and more only while the threads use little processor time.
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
from arborl.tools.threads import in_thread

FEW = 8
"""Calls that run at once in any case."""
MANY = 256
"""Calls that run at once at most."""
LOOK = 0.02
"""Seconds between two looks at the processor time, while calls wait for a slot."""
BUSY = 0.005
"""Processor seconds between two looks above which the calls are said to compute. Not a share of the time between them:
where the machine is overloaded, a look comes late and a call that computes gets little."""
SECONDS = 30.0
"""What a call may take before it is said to hang, where no deadline is around it."""
MAIN_THREAD = "signal only works in main thread"
IN_THE_LOOP = (
    "Plain rewards run in threads. Write @arborl.reward(blocking=False), or `blocking: false` among the arguments of "
    "score_function: it then runs in the event loop of the run, and must be quick."
)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What `function(*args, **more)` returns, awaited where it can be; a plain function is called in a thread.

    Example:
        verdict = await call(judge, prompt)
    """
    return await (function(*args, **more) if is_async(function) else threaded(function, *args, **more))


async def threaded(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What the plain `function(*args, **more)` returns, called in a thread; awaited here where it can be."""
    slots = _slots_here()
    await slots.take()
    try:
        whose, seconds = current_deadline() or (getattr(function, "__name__", type(function).__name__), SECONDS)
        value = await in_thread(functools.partial(slots.measured, function, *args, **more), whose, seconds)
    except ValueError as error:
        if MAIN_THREAD not in str(error):
            raise
        raise ValueError(f"{error}. {IN_THE_LOOP}") from error
    finally:
        slots.give_back()
    return await value if inspect.isawaitable(value) else value


class CallSlots:
    """How many plain calls run at the same time in one event loop: few, and more while they use little processor time.

    Example:
        await slots.take()
        try:
            value = await in_thread(functools.partial(slots.measured, function))
        finally:
            slots.give_back()
    """

    def __init__(self) -> None:
        self.taken, self.limit = 0, FEW
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.lock = threading.Lock()
        self.running: dict[int, float] = {}
        """Threads in a call, and the processor time that each had used before it."""
        self.used = 0.0
        """Processor seconds of the calls that have returned."""
        self.seen: float | None = None
        """The processor time at the last look; None where no look is planned."""

    async def take(self) -> None:
        """Wait for a slot; meanwhile the deadlines around stand still."""
        if self.taken < self.limit and not self.waiting:
            self.taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        self._plan_look()
        try:
            with paused_deadlines():
                await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given in this very moment
                self.give_back()
            raise

    def give_back(self) -> None:
        """The call has returned, or is left behind."""
        self.taken -= 1
        if self.taken == 0:
            self.limit = FEW
        self._admit()

    def measured(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """`function(*args, **more)`, with the processor time of its thread."""
        thread = threading.get_ident()
        with self.lock:
            self.running[thread] = time.thread_time()
        try:
            return function(*args, **more)
        finally:
            with self.lock:
                self.used += time.thread_time() - self.running.pop(thread)

    def _admit(self) -> None:
        while self.waiting and self.taken < self.limit:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.taken += 1

    def _plan_look(self) -> None:
        if self.seen is None:
            self.seen = self._processor_seconds()
            asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        """Let more run at once where the threads have computed little since the last look, fewer where much."""
        assert self.seen is not None
        computed = self._processor_seconds() - self.seen
        self.limit = min(MANY, 2 * self.limit) if computed < BUSY else max(FEW, self.limit // 2)
        self.seen = None
        self._admit()
        if self.waiting:
            self._plan_look()

    def _processor_seconds(self) -> float:
        """Of all calls so far, those still running included where the system tells (not on macOS)."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        with self.lock:  # no thread in `running` can end meanwhile
            if clock_of is None:
                return self.used
            running = (time.clock_gettime(clock_of(thread)) - before for thread, before in self.running.items())
            return self.used + sum(running)


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, CallSlots] = WeakKeyDictionary()


def _slots_here() -> CallSlots:
    return _slots.setdefault(asyncio.get_running_loop(), CallSlots())
