"""Environments in threads: an environment that blocks does not delay other episodes.

An environment in a thread keeps that thread from its constructor to `close`, so what it opens there (a database, an
event loop) stays valid. A thread whose call exceeds the deadline is abandoned: the episode fails, the thread closes the
environment when the call returns, and the next episode gets another thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from arborl.envs.env import Env, Observation, Step
from arborl.envs.wrapper import EnvWrapper
from arborl.errors import ArborError, boundary
from arborl.tools.core.background_threads import AbandonedCalls
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image

IDLE_SECONDS = 10.0
OTHER_LOOP = re.compile(r"a different (event )?loop")
OTHER_LOOP_ADVICE = (
    "An environment in a thread has its own event loop. Make objects of a loop (clients, locks) in reset(), "
    "or write `blocking = False` in its class: it then runs in the run's event loop and must never block it."
)

Job = Callable[[], object]


class ThreadTimeout(ArborError):
    """A call in a thread exceeded its deadline and was abandoned."""


class EnvThread:
    """A daemon thread that runs jobs in order."""

    def __init__(self, pool: ThreadPool):
        self.pool, self.has_ended = pool, False
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, name="arborl-environment", daemon=True).start()

    def submit(self, job: Job) -> None:
        self.jobs.put(job)

    def run(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """The result of `function()`, awaited if it is awaitable, or what it raised. Called in this thread."""
        try:
            return self.run_awaitable(function()), None
        except BaseException as error:
            return None, _raisable(error)

    def wait(self, what: str, seconds: float, function: Callable[[], Any]) -> Any:
        """The result of `function()`, without an event loop. Ctrl-C ends the wait."""
        results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.submit(lambda: results.put(self.run(function)))
        try:
            value, error = results.get(timeout=seconds)
        except Empty:
            raise ThreadTimeout(f"{what} did not return within {seconds:g} s.") from None
        if error is not None:
            raise error
        return value

    def end(self, last: Job) -> None:
        """Run `last` after the jobs in the queue, then end the thread."""

        def job() -> None:
            last()
            self.has_ended = True
            self.pool.left.remove(self)

        self.submit(job)

    def run_awaitable(self, value: Any) -> Any:
        """The result of an awaitable, run in this thread; any other value unchanged."""
        if not inspect.isawaitable(value):
            return value
        self.loop = self.loop or asyncio.new_event_loop()

        async def result() -> Any:
            return await value

        return self.loop.run_until_complete(result())

    def _run(self) -> None:
        while not self.has_ended:
            try:
                job = self.jobs.get(timeout=IDLE_SECONDS)
            except Empty:
                self.has_ended = self.pool.retire(self)
                continue
            job()
        if self.loop is not None:
            self.loop.close()


def _raisable(error: BaseException) -> BaseException:
    """The error as it can be raised in the episode: StopIteration cannot be raised by a future, and SystemExit,
    KeyboardInterrupt and CancelledError of a call end that call alone."""
    text = f"{type(error).__name__}: {error}"
    is_other_loop = isinstance(error, RuntimeError) and OTHER_LOOP.search(str(error))
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        text = f"{error}. {OTHER_LOOP_ADVICE}" if is_other_loop else ""
    return RuntimeError(text).with_traceback(error.__traceback__) if text else error


class LoopResults:
    """Results of threads for one event loop. Results that arrive together wake the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.arrived: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self.is_scheduled = False

    def submit(self, thread: EnvThread, function: Callable[[], Any]) -> asyncio.Future[Any]:
        outcome = self.loop.create_future()
        thread.submit(lambda: self._add(outcome, *thread.run(function)))
        return outcome

    def _add(self, outcome: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self.arrived.append((outcome, value, error))
        if not self.is_scheduled:  # `_deliver` clears it before it reads, so no result is missed
            self.is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self.is_scheduled = False
        while self.arrived:
            outcome, value, error = self.arrived.popleft()
            if not outcome.done():  # not cancelled
                outcome.set_result(value) if error is None else outcome.set_exception(error)


class ThreadPool:
    """Threads of environments; each environment has its own."""

    def __init__(self) -> None:
        self._results: LoopResults | None = None
        self.lock = threading.Lock()
        self.idle: list[EnvThread] = []
        self.left = AbandonedCalls()
        self.num_abandoned = 0

    def results(self) -> LoopResults:
        loop = asyncio.get_running_loop()
        if self._results is None or self._results.loop is not loop:
            self._results = LoopResults(loop)
        return self._results

    def take(self) -> EnvThread:
        with self.lock:
            return self.idle.pop() if self.idle else EnvThread(self)

    def give_back(self, thread: EnvThread) -> None:
        with self.lock:
            self.idle.append(thread)

    def retire(self, thread: EnvThread) -> bool:
        """Whether an idle thread may end; False if it was just taken."""
        with self.lock:
            if thread not in self.idle:
                return False
            self.idle.remove(thread)
            return True

    def metrics(self) -> Metrics:
        """Threads abandoned since the last call, and abandoned threads that are still running."""
        abandoned, self.num_abandoned = self.num_abandoned, 0
        return {"rollout/threads_abandoned": float(abandoned), "rollout/threads_stuck": float(len(self.left.calls))}


class ElsewhereEnv(Env):
    """An environment in a thread or a process; its plain methods are called there and waited for."""

    def _call_sync(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    def actions(self) -> list[str]:
        return self._call_sync("actions")  # type: ignore[no-any-return]

    def oracle(self) -> str | None:
        return self._call_sync("oracle")  # type: ignore[no-any-return]

    def random(self, rng: Generator) -> str | None:
        return self._call_sync("random", rng)  # type: ignore[no-any-return]

    def state_key(self) -> str:
        return self._call_sync("state_key")  # type: ignore[no-any-return]

    def snapshot(self) -> Any:
        return self._call_sync("snapshot")

    def restore(self, snapshot: Any) -> None:
        self._call_sync("restore", snapshot)

    def render(self) -> str:
        return self._call_sync("render")  # type: ignore[no-any-return]

    def picture(self) -> Image | None:
        return self._call_sync("picture")  # type: ignore[no-any-return]


class ThreadEnv(ElsewhereEnv, EnvWrapper):
    def __init__(self, pool: ThreadPool, name: str, seconds: float):
        self.pool, self.name, self.seconds = pool, name, seconds
        self.thread: EnvThread | None = None
        self.deadline = 0.0
        self.is_stuck = False
        """The last call was given up before it returned."""
        self.final_metrics: Metrics | None = None

    async def open(self, make: Callable[[], Env]) -> None:
        try:
            async with boundary(self.name, self.seconds):
                self.env = await self.call(make)
        except BaseException:
            self.release()
            raise

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self.call(lambda: self.env.reset(task, seed))  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        return await self.call(lambda: self.env.step(action))  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close the environment in its thread. A stuck thread closes it when its call returns."""
        thread = self.thread
        if thread is None:
            return
        if self.is_stuck:
            self.release(lambda: self._close_late(thread))
            return
        try:
            await self.call(lambda: self._close(thread))
        finally:
            self.release()

    def release(self, last: Job = lambda: None) -> None:
        """Give the thread back. A stuck thread is abandoned and runs `last` when its call returns."""
        thread, self.thread = self.thread, None
        if thread is None:
            return
        if self.is_stuck:
            self.pool.left.add(thread, self.name, self.deadline)
            self.pool.num_abandoned += 1
            thread.end(last)
        else:
            self.pool.give_back(thread)

    def _close(self, thread: EnvThread) -> None:
        thread.run_awaitable(self.env.close())
        self.final_metrics = thread.run_awaitable(self.env.metrics())

    def _close_late(self, thread: EnvThread) -> None:
        with suppress(BaseException):  # the episode has already failed
            thread.run_awaitable(self.env.close())

    async def call(self, function: Callable[[], Any]) -> Any:
        """The result of a function in the environment's thread."""
        thread = self.thread = self.thread or self.pool.take()
        outcome = self.pool.results().submit(thread, function)
        self.deadline, self.is_stuck = time.monotonic() + self.seconds, True
        try:
            return await outcome
        finally:
            self.is_stuck = outcome.cancelled()

    def _call_sync(self, method: str, *args: Any) -> Any:
        function = functools.partial(getattr(self.env, method), *args)
        if self.thread is None:
            return function()
        self.deadline = time.monotonic() + self.seconds
        try:
            return self.thread.wait(f"{method}()", self.seconds, function)
        except ThreadTimeout:
            self.is_stuck = True
            raise

    def metrics(self) -> Metrics:
        return self._call_sync("metrics") if self.final_metrics is None else self.final_metrics  # type: ignore[no-any-return]
