"""Replicas of one engine: routing, failover and recovery.

Requests of one session go to one replica, which has their prefix cached; a new session goes to the least busy one. A
replica that fails gets no requests until a background task has reached it and given it the newest weights; its requests
move to other replicas. HTTP servers, Ray engines and reward workers use this pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from arborl.errors import EngineError
from arborl.types import Metrics

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
MAX_SESSIONS = 20_000


class ReplicaUnavailable(EngineError):
    """The replica does not answer or is in no state to answer; another may."""


class WeightMismatch(EngineError):
    """A replica samples from other weights than the learner's."""


@dataclass(eq=False, slots=True)
class Replica:
    name: str
    up: bool = False
    version: int | None = None
    """Policy version of its weights; None if they are not this run's."""
    busy: int = 0
    why: str = ""
    last_response: float = 0.0
    """Time of the last response; of the last request if it was idle before."""
    lost_at: float = 0.0
    uncounted_since: float | None = None
    """Start of the lost time that `metrics` has not reported yet."""


R = TypeVar("R", bound=Replica)
T = TypeVar("T")


@dataclass(slots=True)
class LoopState:
    loop: asyncio.AbstractEventLoop
    recoveries: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    recovered: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicaPool(Generic[R]):
    """Routes requests to replicas and recovers lost ones."""

    def __init__(self, all: Sequence[R], revive: Callable[[R], Awaitable[None]], seconds: float, noun: str = "server"):
        self.all, self.revive, self.seconds, self.noun = all, revive, seconds, noun
        self.sessions: OrderedDict[str, R] = OrderedDict()
        self.target_version = 0
        self.closed = False
        self.counts = dict.fromkeys(("retried", "lost", "seconds_lost"), 0.0)
        self._state: LoopState | None = None

    @property
    def up(self) -> list[R]:
        return [replica for replica in self.all if replica.up]

    def is_saturated(self, max_requests: int) -> bool:
        """Whether every replica has `max_requests` requests; False while none is up."""
        up = self.up
        return bool(up) and all(replica.busy >= max_requests for replica in up)

    async def ask(self, session: str, work: Callable[[R], Awaitable[T]]) -> T:
        """Result of `work` by the session's replica, or by another if that one is lost."""
        while True:
            replica = await self.choose(session)
            if not replica.busy:
                replica.last_response = time.perf_counter()
            replica.busy += 1
            try:
                result = await work(replica)
                replica.last_response = time.perf_counter()
                return result
            except ReplicaUnavailable as error:
                self.lose(replica, str(error))
                self.counts["retried"] += 1
            finally:
                replica.busy -= 1

    async def choose(self, session: str) -> R:
        """The session's replica, or the least busy one. Waits up to `seconds` while none is up, then raises."""
        state, deadline = self._loop_state(), time.perf_counter() + self.seconds
        while True:
            if self.closed:
                raise EngineError("the engine was closed")
            self.start_recoveries()
            if up := self.up:
                chosen = self.sessions.get(session)
                if chosen is None or not chosen.up:
                    chosen = min(up, key=lambda replica: replica.busy)
                self.sessions[session] = chosen
                self.sessions.move_to_end(session)
                while len(self.sessions) > MAX_SESSIONS:
                    self.sessions.popitem(last=False)
                return chosen
            state.recovered.clear()
            try:
                await asyncio.wait_for(state.recovered.wait(), max(0.0, deadline - time.perf_counter()))
            except TimeoutError:
                reasons = "; ".join(replica.why for replica in self.all)
                raise EngineError(f"no {self.noun} has answered for {self.seconds:g} s: {reasons}") from None

    async def publish(self, version: int, give: Callable[[R], Awaitable[None]]) -> dict[R, EngineError]:
        """Give the weights of a version to all replicas that are up; returns the errors of those that failed."""
        self.target_version = version
        recoveries, self._loop_state().recoveries = self._loop_state().recoveries, {}
        for task in recoveries.values():
            task.cancel()  # it may be about to hand out older weights
        self.start_recoveries()
        up = self.up
        for replica in up:
            replica.last_response = replica.last_response if replica.busy else time.perf_counter()
        outcomes = await asyncio.gather(*map(give, up), return_exceptions=True)
        errors: dict[R, EngineError] = {}
        for replica, outcome in zip(up, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                errors[replica] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        self.sessions.clear()  # prefix caches are stale in any case
        return errors

    async def settle(self, errors: dict[R, EngineError]) -> None:
        """Drop the replicas that failed to take weights; if none is left, wait for one or raise."""
        for replica, error in errors.items():
            self.lose(replica, str(error))
        if not self.up:
            for error in errors.values():
                if not isinstance(error, ReplicaUnavailable):  # waiting does not help
                    raise error
            await self.choose("update")

    def lose(self, replica: R, why: str) -> None:
        """Send no requests to a replica until it has the newest weights."""
        replica.why = why
        if replica.up:
            replica.up = False
            replica.lost_at = replica.uncounted_since = replica.last_response or time.perf_counter()
            self.counts["lost"] += 1
            article = "an" if self.noun[0] in "aeiou" else "a"
            log.warning("%s %s is lost and will be retried: %s", article, self.noun, why)
        self.start_recoveries()

    def start_recoveries(self) -> None:
        state = self._loop_state()
        for replica in self.all:
            if not replica.up and (replica.name not in state.recoveries or state.recoveries[replica.name].done()):
                state.recoveries[replica.name] = asyncio.create_task(self._recover(replica))

    async def _recover(self, replica: R) -> None:
        """Retry until the replica answers and has the newest weights."""
        while not self.closed:
            try:
                await self.revive(replica)
            except EngineError as error:
                if replica.why != (why := str(error)) and not isinstance(error, (ReplicaUnavailable, WeightMismatch)):
                    log.warning("a %s answers again but is not used: %s", self.noun, why)
                replica.why = why
            else:
                if replica.version == self.target_version:
                    self._count_lost_time(replica)
                    replica.up, replica.uncounted_since = True, None
                    lost = f" after {time.perf_counter() - replica.lost_at:.1f} s" if replica.lost_at else ""
                    log.warning("%s answers again%s", replica.name, lost)
                    self._loop_state().recovered.set()
                    return
            await asyncio.sleep(RETRY_SECONDS)

    def _count_lost_time(self, replica: R) -> None:
        now = time.perf_counter()
        if replica.uncounted_since is not None:
            self.counts["seconds_lost"] += now - replica.uncounted_since
            replica.uncounted_since = now

    def metrics(self) -> Metrics:
        """Since the last call: requests retried, replicas lost, and their lost seconds since the last response; and the
        number of replicas that are up."""
        for replica in self.all:
            self._count_lost_time(replica)
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        return {f"engine/{name}": value for name, value in counts.items()} | {"engine/servers": float(len(self.up))}

    def close(self) -> None:
        self.closed = True
        state, self._state = self._state, None
        if state is not None and not state.loop.is_closed():
            for task in state.recoveries.values():
                task.cancel()
            state.recovered.set()

    def leave_loop(self) -> None:
        """Release this event loop; another may follow."""
        state, self._state = self._state, None
        for task in state.recoveries.values() if state is not None else ():
            task.cancel()

    def _loop_state(self) -> LoopState:
        loop = asyncio.get_running_loop()
        if self._state is None or self._state.loop is not loop:
            self._state = LoopState(loop)
        return self._state


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also inside a running event loop. An interrupt of the caller cancels it."""
    started: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = SimpleQueue()

    async def tracked() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.put((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(max_workers=1) as thread:
        outcome = thread.submit(asyncio.run, tracked())
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():
                loop, task = started.get()
                loop.call_soon_threadsafe(task.cancel)
            raise
