"""Many calls of an actor as few Ray calls.

A Ray call costs the driver 1 to 2 ms of CPU time, so a call per model call limits a driver to some 500 per second.
`ActorCalls` sends all calls that were made since the last Ray call together, and one pending Ray call returns all that
have finished since. Without load a call is sent at once; under load the batches grow.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

NumberedCall = tuple[int, str, tuple[Any, ...]]
"""Number, method of the actor, arguments."""
Finished = tuple[int, Any, Exception | None]
"""Number, result, exception."""


class BatchedActor:
    """The actor's side: base class of actors."""

    def __init__(self) -> None:
        self.running: dict[int, asyncio.Task[Any]] = {}
        self.finished: list[Finished] = []
        self.has_finished = asyncio.Event()

    async def submit(self, calls: Sequence[NumberedCall], cancelled: Sequence[int]) -> None:
        """Start calls, and cancel earlier ones."""
        for number in cancelled:
            if (task := self.running.get(number)) is not None:
                task.cancel()
        for number, method, args in calls:
            task = self.running[number] = asyncio.create_task(getattr(self, method)(*args))
            task.add_done_callback(partial(self._on_end, number))

    def _on_end(self, number: int, task: asyncio.Task[Any]) -> None:
        del self.running[number]
        if task.cancelled():
            return
        error = task.exception()
        result = (number, task.result(), None) if error is None else (number, None, sendable(error))
        self.finished.append(result)
        self.has_finished.set()

    async def collect(self) -> list[Finished]:
        """Wait until a call has ended; returns all that have ended since the last time."""
        await self.has_finished.wait()
        finished, self.finished = self.finished, []
        self.has_finished.clear()
        return finished


def sendable(error: BaseException) -> Exception:
    """The exception if it can be pickled, else its text."""
    from ray import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


class ActorCalls:
    """The driver's side: calls of one actor. All methods may be called from any thread."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.lock = threading.Lock()
        self.numbers = count()
        self.pending: dict[int, Future[Any]] = {}
        self.calls: list[NumberedCall] = []
        self.cancelled: list[int] = []
        """Calls and cancellations that are not sent yet."""
        self.is_sending = self.is_collecting = False
        self.error: BaseException | None = None
        """Why no further call is possible."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method; cancelling the future cancels the call. An exception of the method is that of the future; if
        the actor is lost, it is Ray's."""
        future: Future[Any] = Future()
        with self.lock:
            if self.error is not None:
                future.set_exception(self.error)
                return future
            number = next(self.numbers)
            self.pending[number] = future
            self.calls.append((number, method, args))
        future.add_done_callback(partial(self._on_done, number))
        SENDER.wake(self)
        return future

    def _on_done(self, number: int, future: Future[Any]) -> None:
        if future.cancelled():
            with self.lock:
                self.pending.pop(number, None)
                self.cancelled.append(number)
            SENDER.wake(self)

    def send(self) -> None:
        """Send what is waiting, unless a batch is on its way; called by the sending thread."""
        with self.lock:
            if self.is_sending or self.error is not None or not (self.calls or self.cancelled):
                return
            calls, self.calls, cancelled, self.cancelled = self.calls, [], self.cancelled, []
            starts_collecting, self.is_collecting = not self.is_collecting, True
            self.is_sending = True
        try:
            self.actor.submit.remote(calls, cancelled).future().add_done_callback(self._on_sent)
            if starts_collecting:
                self.collect()
        except Exception as error:  # the cluster is gone
            self._fail(error)

    def collect(self) -> None:
        self.actor.collect.remote().future().add_done_callback(self._on_finished)

    def _on_sent(self, outcome: Future[None]) -> None:
        if (error := outcome.exception()) is not None:
            self._fail(error)
            return
        with self.lock:
            self.is_sending = False
        SENDER.wake(self)

    def _on_finished(self, outcome: Future[list[Finished]]) -> None:
        if (error := outcome.exception()) is not None:
            self._fail(error)
            return
        SENDER.wake(self, collect=True)
        for number, result, failure in outcome.result():
            with self.lock:
                future = self.pending.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(failure)

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            pending, self.pending = self.pending, {}
            self.calls, self.cancelled = [], []
        for future in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


class CallSender:
    """One thread that makes the Ray calls of all `ActorCalls`: Ray's callback threads must not block."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[ActorCalls, bool]] = SimpleQueue()
        self.lock = threading.Lock()
        self.is_started = False

    def wake(self, calls: ActorCalls, collect: bool = False) -> None:
        with self.lock:
            if not self.is_started:
                self.is_started = True
                threading.Thread(target=self._run, name="arborl-ray-calls", daemon=True).start()
        self.queue.put((calls, collect))

    def _run(self) -> None:
        while True:
            calls, collect = self.queue.get()
            try:
                if collect:
                    calls.collect()
                calls.send()
            except Exception as error:  # the cluster is gone
                calls._fail(error)


SENDER = CallSender()
