"""Several places that answer the same: which a request goes to, and what happens when one goes or comes back.

Calls of one session go to one replica, which has read its beginning; a new session goes to the one with the least to
do. A replica that fails is left alone, and its requests go to others. Somebody tries to get it back, and it is given
the newest weights before its first request. Servers over HTTP and actors of a cluster are both chosen here.
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

AGAIN = 1.0
"""Seconds between two attempts to reach a replica that is gone."""
SESSIONS = 20_000
"""Sessions whose replica is remembered."""


class Unreachable(EngineError):
    """The replica is gone, or in no state to answer: another may."""


class OtherWeights(EngineError):
    """A copy does not say what the learner's model says."""


@dataclass(eq=False, slots=True)
class Replica:
    """One of several."""

    name: str
    up: bool = False
    version: int | None = None
    """Of the weights that it holds; None where they are not ours."""
    busy: int = 0
    """Requests under way."""
    why: str = ""
    """What was wrong when it was last tried."""
    heard: float = 0.0
    """When it last answered; or was asked, where it had nothing else to do."""
    since: float = 0.0
    """Since when it has been gone: what was asked of it after it was last heard is lost too."""
    missed: float | None = None
    """Since when it has been gone and nobody was told of the time."""


R = TypeVar("R", bound=Replica)
T = TypeVar("T")


@dataclass(slots=True)
class Here:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    coming: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Attempts to get replicas back."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when one is back."""


class Replicas(Generic[R]):
    """Chooses among replicas, and looks after those that are gone.

    Args:
        all: the replicas.
        revive: tries to get one back, with the weights of `coming`; raises EngineError where it does not succeed.
        seconds: how long to wait where none answers.
        noun: what one is called.

    Example:
        said = await replicas.ask("episode 7", lambda replica: replica.sample(prompt))
    """

    def __init__(self, all: Sequence[R], revive: Callable[[R], Awaitable[None]], seconds: float, noun: str = "server"):
        self.all, self.revive, self.seconds, self.noun = all, revive, seconds, noun
        self.sessions: OrderedDict[str, R] = OrderedDict()
        self.coming = 0
        """The version that all are to have."""
        self.closed = False
        self.counts = dict.fromkeys(("retried", "lost", "seconds_lost"), 0.0)
        self._here: Here | None = None

    @property
    def up(self) -> list[R]:
        return [replica for replica in self.all if replica.up]

    def crowded(self, most: int) -> bool:
        """Whether every replica has as much to do as it is to have; where none is there, requests find out."""
        up = self.up
        return bool(up) and all(replica.busy >= most for replica in up)

    async def ask(self, session: str, work: Callable[[R], Awaitable[T]]) -> T:
        """What `work` gets from the session's replica, or from another where that one is gone."""
        while True:
            replica = await self.choose(session)
            if not replica.busy:
                replica.heard = time.perf_counter()
            replica.busy += 1
            try:
                said = await work(replica)
                replica.heard = time.perf_counter()
                return said
            except Unreachable as error:
                self.lose(replica, str(error))
                self.counts["retried"] += 1
            finally:
                replica.busy -= 1

    async def choose(self, session: str) -> R:
        """The session's replica; else the one with the least to do. Waits where none answers, and then says why."""
        here, until = self._in_loop(), time.perf_counter() + self.seconds
        while True:
            if self.closed:
                raise EngineError("the engine was closed")
            self.look_after()
            if up := self.up:
                chosen = self.sessions.get(session)
                if chosen is None or not chosen.up:
                    chosen = min(up, key=lambda replica: replica.busy)
                self.sessions[session] = chosen
                self.sessions.move_to_end(session)
                while len(self.sessions) > SESSIONS:
                    self.sessions.popitem(last=False)
                return chosen
            here.changed.clear()
            try:
                await asyncio.wait_for(here.changed.wait(), max(0.0, until - time.perf_counter()))
            except TimeoutError:
                why = "; ".join(replica.why for replica in self.all)
                raise EngineError(f"no {self.noun} has answered for {self.seconds:g} s: {why}") from None

    async def publish(self, version: int, give: Callable[[R], Awaitable[None]]) -> dict[R, EngineError]:
        """All that answer are given the weights of a version, by `give`; except for these, which failed."""
        self.coming = version
        coming, self._in_loop().coming = self._in_loop().coming, {}
        for task in coming.values():
            task.cancel()  # it may be about to hand out the weights before these
        self.look_after()
        up = self.up
        for replica in up:
            replica.heard = replica.heard if replica.busy else time.perf_counter()
        outcomes = await asyncio.gather(*map(give, up), return_exceptions=True)
        errors: dict[R, EngineError] = {}
        for replica, outcome in zip(up, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                errors[replica] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        self.sessions.clear()  # what one had read of an episode must be read again in any case
        return errors

    async def settle(self, errors: dict[R, EngineError]) -> None:
        """Leave those alone that took no weights; where none did, wait for one that does, or say why none does."""
        for replica, error in errors.items():
            self.lose(replica, str(error))
        if not self.up:
            for error in errors.values():
                if not isinstance(error, Unreachable):  # no waiting will mend it
                    raise error
            await self.choose("update")

    def lose(self, replica: R, why: str) -> None:
        """Send nothing there until it has been given the newest weights."""
        replica.why = why
        if replica.up:
            replica.up = False
            replica.since = replica.missed = replica.heard or time.perf_counter()
            self.counts["lost"] += 1
            article = "an" if self.noun[0] in "aeiou" else "a"
            log.warning("%s %s is left alone until it answers again: %s", article, self.noun, why)
        self.look_after()

    def look_after(self) -> None:
        """See that somebody tries to get every replica back that is gone."""
        here = self._in_loop()
        for replica in self.all:
            if not replica.up and (replica.name not in here.coming or here.coming[replica.name].done()):
                here.coming[replica.name] = asyncio.create_task(self._fetch_back(replica))

    async def _fetch_back(self, replica: R) -> None:
        """Try until it answers; give it the newest weights, and only then requests."""
        while not self.closed:
            try:
                await self.revive(replica)
            except EngineError as error:
                if replica.why != (why := str(error)) and not isinstance(error, (Unreachable, OtherWeights)):
                    log.warning("a %s that answers again is not taken back: %s", self.noun, why)
                replica.why = why
            else:
                if replica.version == self.coming:
                    self._count(replica)
                    replica.up, replica.missed = True, None
                    gone = f" after {time.perf_counter() - replica.since:.1f} s" if replica.since else ""
                    log.warning("%s answers again%s", replica.name, gone)
                    self._in_loop().changed.set()
                    return
            await asyncio.sleep(AGAIN)

    def _count(self, replica: R) -> None:
        now = time.perf_counter()
        if replica.missed is not None:
            self.counts["seconds_lost"] += now - replica.missed
            replica.missed = now

    def metrics(self) -> Metrics:
        """Since the last call: requests sent again, replicas lost, and the seconds that those were gone, from when they
        were last heard; and how many answer now."""
        for replica in self.all:
            self._count(replica)
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        return {f"engine/{name}": value for name, value in counts.items()} | {"engine/servers": float(len(self.up))}

    def close(self) -> None:
        """Nobody is looked after any more, and whoever waits for one is told."""
        self.closed = True
        here, self._here = self._here, None
        if here is not None and not here.loop.is_closed():
            for task in here.coming.values():
                task.cancel()
            here.changed.set()

    def leave(self) -> None:
        """Let go of this event loop; another may follow."""
        here, self._here = self._here, None
        for task in here.coming.values() if here is not None else ():
            task.cancel()

    def _in_loop(self) -> Here:
        loop = asyncio.get_running_loop()
        if self._here is None or self._here.loop is not loop:
            self._here = Here(loop)
        return self._here


def now(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, also where a loop is running already. Who is interrupted meanwhile interrupts it."""
    begun: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = SimpleQueue()

    async def watched() -> None:
        task = asyncio.current_task()
        assert task is not None
        begun.put((asyncio.get_running_loop(), task))
        await work

    with ThreadPoolExecutor(max_workers=1) as thread:
        outcome = thread.submit(asyncio.run, watched())
        try:
            outcome.result()
        except BaseException:
            if not outcome.done():
                loop, task = begun.get()
                loop.call_soon_threadsafe(task.cancel)
            raise
