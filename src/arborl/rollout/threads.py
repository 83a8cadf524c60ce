"""Environments in threads: one that blocks, or sleeps, keeps nobody else from playing.

An environment has a thread to itself from when it is made to its `close`, so what it opened there (a database, an event
loop) it finds again. A thread whose call does not come back in time is left behind: the episode goes on without it, the
environment is closed by that thread itself when the call returns after all, and the next episode gets another.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
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

IDLE = 10.0
"""Seconds after which a thread that nobody needs ends."""

ELSEWHERE = re.compile(r"a different (event )?loop")
SHARED = (
    "An environment in a thread has an event loop of its own. Make what belongs to a loop (clients, locks) in reset(), "
    "or write `blocking = False` in its class: it then runs in the run's event loop, and must never block that."
)

Job = Callable[[], None]


class TooLong(ArborError):
    """A call in a thread was given up."""


class Hand:
    """A thread that does one job after another."""

    def __init__(self, pool: Threads):
        self.pool, self.ended = pool, False
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._work, name="arborl-environment", daemon=True).start()

    def submit(self, job: Job) -> None:
        self.jobs.put(job)

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """What `function()` returns, to come; awaited here where it can be."""
        outcome: Future[Any] = Future()
        self.submit(lambda: _settle(outcome, lambda: self.settle(function())))
        return outcome

    def wait(self, what: str, seconds: float, function: Callable[[], Any]) -> Any:
        """What `function()` returns, waited for here, without an event loop; Ctrl-C ends the wait."""
        outcome = self.ask(function)
        try:
            return outcome.result(seconds)
        except TimeoutError:
            if outcome.done():  # that was its own
                raise
            raise TooLong(f"{what} did not come back within {seconds:g} s: it hangs, or blocks for longer.") from None

    def end(self, last: Job) -> None:
        """Do this when everything before it is done, and no more."""

        def job() -> None:
            last()
            self.ended = True
            self.pool.left.remove(self)

        self.submit(job)

    def settle(self, value: Any) -> Any:
        """What an async environment returns, run to its end here; anything else as it is."""
        if not inspect.isawaitable(value):
            return value
        self.loop = self.loop or asyncio.new_event_loop()

        async def result() -> Any:
            return await value

        return self.loop.run_until_complete(result())

    def _work(self) -> None:
        while not self.ended:
            try:
                job = self.jobs.get(timeout=IDLE)
            except Empty:
                self.ended = self.pool.retire(self)
                continue
            job()
        if self.loop is not None:
            self.loop.close()


def _settle(outcome: Future[Any], function: Callable[[], Any]) -> None:
    value: Any = None
    error: BaseException | None = None
    try:
        value = function()
    except RuntimeError as raised:
        words = f"{raised}. {SHARED}" if ELSEWHERE.search(str(raised)) else ""
        error = RuntimeError(words).with_traceback(raised.__traceback__) if words else raised
    except Exception as raised:
        error = raised
    except BaseException as raised:  # SystemExit, KeyboardInterrupt, CancelledError: they end the call, no more
        error = RuntimeError(f"{type(raised).__name__}: {raised}").with_traceback(raised.__traceback__)
    if isinstance(error, StopIteration):  # which a future cannot hold
        error = RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__)
    with suppress(InvalidStateError):  # cancelled: nobody waits any more
        outcome.set_exception(error) if error is not None else outcome.set_result(value)


class Threads:
    """The threads of a rollout; as many as environments that want one at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Hand] = []
        self.left = AbandonedCalls()
        """Threads whose call has not come back."""
        self.abandoned = 0

    def take(self) -> Hand:
        with self.lock:
            return self.idle.pop() if self.idle else Hand(self)

    def give_back(self, hand: Hand) -> None:
        with self.lock:
            self.idle.append(hand)

    def leave(self, hand: Hand, last: Job, name: str, due: float) -> None:
        """It is busy with a call nobody waits for any more; when that returns it does `last`, and ends.

        Args:
            hand: the thread.
            last: what it does then.
            name: of the environment it is busy with.
            due: when that should have been done.
        """
        self.left.add(hand, name, due)
        self.abandoned += 1
        hand.end(last)

    def retire(self, hand: Hand) -> bool:
        """Whether an idle thread may end: not if it was just taken."""
        with self.lock:
            if hand not in self.idle:
                return False
            self.idle.remove(hand)
            return True

    def metrics(self) -> Metrics:
        """Since the last call: threads left behind; and how many have not come back yet."""
        abandoned, self.abandoned = self.abandoned, 0
        return {"rollout/threads_abandoned": float(abandoned), "rollout/threads_stuck": float(len(self.left.calls))}


class ThreadEnv(EnvWrapper):
    """An environment that is made in a thread, and called in it until it is closed.

    Args:
        pool: where threads come from.
        name: what it is called when it hangs.
        seconds: what one call may take before it is said to.
    """

    def __init__(self, pool: Threads, name: str, seconds: float):
        self.pool, self.name, self.seconds = pool, name, seconds
        self.hand: Hand | None = None
        self.due = 0.0
        """When the last call should be done."""
        self.stuck = False
        """A call was given up before it came back."""
        self.numbers: Metrics | None = None

    async def open(self, make: Callable[[], Env]) -> None:
        """Make it there."""
        try:
            async with boundary(self.name, self.seconds):
                self.env = await self._call(make)
        except BaseException:
            self.release()
            raise

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._call(lambda: self.env.reset(task, seed))  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        return await self._call(lambda: self.env.step(action))  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close it in its thread; where that is stuck, the thread does so once it is not."""
        hand = self.hand
        if hand is None:
            return
        if self.stuck:
            self.release(lambda: self._late(hand))
            return
        try:
            await self._call(lambda: self._end(hand))
        finally:
            self.release()

    def release(self, last: Job = lambda: None) -> None:
        """Give the thread back; one that is stuck is left, and does `last` when it is not."""
        hand, self.hand = self.hand, None
        if hand is None:
            return
        if self.stuck:
            self.pool.leave(hand, last, self.name, self.due)
        else:
            self.pool.give_back(hand)

    def _end(self, hand: Hand) -> None:
        hand.settle(self.env.close())
        self.numbers = hand.settle(self.env.metrics())

    def _late(self, hand: Hand) -> None:
        with suppress(BaseException):  # the episode has long failed, by name
            hand.settle(self.env.close())

    async def _call(self, function: Callable[[], Any]) -> Any:
        """`function()` in the environment's thread."""
        hand = self.hand = self.hand or self.pool.take()
        outcome = asyncio.wrap_future(hand.ask(function))
        self.due, self.stuck = time.monotonic() + self.seconds, True
        try:
            return await outcome
        finally:
            self.stuck = outcome.cancelled()

    def _now(self, what: str, *args: Any) -> Any:
        """An answer of its thread for somebody who cannot wait for it in the event loop."""
        ask = functools.partial(getattr(self.env, what), *args)
        if self.hand is None:
            return ask()
        self.due = time.monotonic() + self.seconds
        try:
            return self.hand.wait(f"{what}()", self.seconds, ask)
        except TooLong:
            self.stuck = True
            raise

    def metrics(self) -> Metrics:
        return self._now("metrics") if self.numbers is None else self.numbers  # type: ignore[no-any-return]

    def actions(self) -> list[str]:
        return self._now("actions")  # type: ignore[no-any-return]

    def oracle(self) -> str | None:
        return self._now("oracle")  # type: ignore[no-any-return]

    def random(self, chance: Generator) -> str | None:
        return self._now("random", chance)  # type: ignore[no-any-return]

    def state_key(self) -> str:
        return self._now("state_key")  # type: ignore[no-any-return]

    def snapshot(self) -> Any:
        return self._now("snapshot")

    def restore(self, snapshot: Any) -> None:
        self._now("restore", snapshot)

    def render(self) -> str:
        return self._now("render")  # type: ignore[no-any-return]

    def picture(self) -> Image | None:
        return self._now("picture")  # type: ignore[no-any-return]
