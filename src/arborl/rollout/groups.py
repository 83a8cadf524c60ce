"""Groups: which episodes are played for a batch, which of them count, and which groups are kept.

A group is one task played several times. Its members share the task, and with it the seed of the start; they play
without waiting for each other or for other groups. Without further wishes a group is complete when all members are
done; with redundancy when enough are, and the rest are cancelled: they leave baseline and loss together, as if they had
never begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arborl.registry import Registry
from arborl.rollout.filters import Keep
from arborl.seeds import derive
from arborl.types import Episode, Group, Metrics, Task

log = logging.getLogger(__name__)

Play = Callable[[Task, int, str, Callable[[], None]], Awaitable[Episode]]
"""Plays a task with a seed, under a name; says when its turn has come."""

FILTERS = Registry(
    "group filter", {"varied": "arborl.rollout.filters:varied", "solvable": "arborl.rollout.filters:solvable"}
)


@dataclass(frozen=True, slots=True)
class Manner:
    """How groups are made. The default waits for everybody and keeps every group."""

    redundancy: int = 0
    """Episodes beyond the group's size: the first to finish count."""
    seconds: float | None = None
    """A group goes on with whoever has finished so long after its first episode began."""
    keep: Keep | None = None
    """Whether a scored group is worth training on; one that is not is dropped, and replaced while there are spares."""
    judge: Callable[[Episode], Awaitable[None]] | None = None
    """Asks the rewards about an episode as soon as it is played; it has finished when they have answered."""
    score: Callable[[Sequence[Group]], Awaitable[None]] | None = None
    """Scores groups, once all that count have finished."""


PLAIN = Manner()


@dataclass(slots=True, eq=False)
class Place:
    """A place of a batch, to be filled with the group of a task or, where that one is dropped, of a spare."""

    batch: int
    at: int
    """Whose group it is to be, by the number of the task in the batch."""
    tasks: Mapping[int, Task]
    spares: deque[int]
    """Of the same source; all of its places share them."""
    seed: int
    """Of the batch."""
    attempt: int = 0
    """How often its group was begun and came to nothing, through no fault of its own."""
    opened: Opened | None = None
    """Its group in play."""
    version: Callable[[], int] = lambda: 0
    """Of the weights that are sampled from now."""

    @property
    def task(self) -> Task:
        return self.tasks[self.at]


def places_of(tasks: Sequence[Task], seed: int, count: int | None = None, batch: int = 0) -> list[Place]:
    """The places of a batch of `count` tasks; those beyond are spares."""
    places, spares = divided([task.source for task in tasks], len(tasks) if count is None else count)
    numbered = dict(enumerate(tasks))
    return [Place(batch, at, numbered, spares[tasks[at].source], seed) for at in places]


class Manager:
    """Makes groups.

    Args:
        play: plays one episode.
        manner: how groups are made.
        counts: what happened is added here: episodes cancelled, groups expired, filtered, and missing at the end.
        lost: failed episodes of groups that are dropped are added here.
    """

    def __init__(self, play: Play, manner: Manner, counts: Counter[str], lost: list[Episode] | None = None):
        self.play, self.manner, self.counts = play, manner, counts
        self.lost = [] if lost is None else lost

    async def collect(self, tasks: Sequence[Task], seed: int, size: int, count: int | None = None) -> list[Group]:
        """The groups of `count` tasks, in the order of the tasks; those beyond are spares.

        A group that is dropped is replaced by the next spare of its source, so a batch keeps its shares. Which tasks
        end up in it follows from the groups alone and not from who finished when: spares are opened in their order,
        one for each dropped group.
        """
        places = places_of(tasks, seed, count)
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(self.fill(place, size)) for place in places]
        found = sorted(zip(places, jobs, strict=True), key=lambda pair: pair[0].at)
        return [group for _, job in found if (group := job.result()) is not None]

    async def fill(self, place: Place, size: int) -> Group | None:
        """A group for one place of a batch: the task's own, or that of a spare; none where these have run out."""
        while True:
            group = await self._group(place, size)
            if await self._kept(group):
                return group
            failed = [episode for episode in group.episodes if episode.failure is not None]
            self.lost += failed
            self.counts.update(filtered=1, filtered_episodes=len(group.episodes), filtered_failed=len(failed))
            if not place.spares:
                self.counts["missing"] += 1
                return None
            place.at = place.spares.popleft()

    async def _kept(self, group: Group) -> bool:
        manner = self.manner
        if manner.score is not None:
            await manner.score([group])
        if manner.keep is None:
            return True
        try:
            return bool(manner.keep(group))
        except Exception:
            log.exception("the group filter failed on task %s, which is kept", group.task.id)
            self.counts["filter_failed"] += 1
            return True

    async def _group(self, place: Place, size: int) -> Group:
        """Play the task, until enough are done. One that is begun again is another game, with another name; and with an
        episode more than it needs, since it will be waited for."""
        task, again = place.task, ("again", place.attempt) if place.attempt else ()
        beyond = self.manner.redundancy + (1 if place.attempt else 0)
        opened = place.opened = Opened(self.manner.seconds, place.version)
        for number in range(size + beyond):
            own = derive(place.seed, "task", place.at, "episode", number, *again)
            name = f"{task.id}#{number}" + (f"+{place.attempt}" if place.attempt else "")
            opened.add(asyncio.ensure_future(self._member(task, own, name, opened.begin)))
        try:
            await opened.wait(size, patient=not beyond)
        finally:
            opened.close()
        counted = opened.counted(size)
        self.counts["expired"] += opened.expired
        self.counts["cancelled"] += len(opened.jobs) - len(counted)
        return Group(task, counted)

    async def _member(self, task: Task, seed: int, name: str, begin: Callable[[], None]) -> Episode:
        episode = await self.play(task, seed, name, begin)
        if self.manner.judge is not None:
            await self.manner.judge(episode)
        return episode


LEAVING: set[asyncio.Future[Any]] = set()
"""Cancelled members and groups that are still closing their environments; a task that nobody holds may be collected
half-way."""


class Opened:
    """A group in play. Its time begins with its first episode, and with it ends for those still playing."""

    def __init__(self, seconds: float | None, version: Callable[[], int] = lambda: 0):
        self.seconds, self.version = seconds, version
        self.begun = 0
        """Episodes that have."""
        self.since: int | None = None
        """The version that the first of them began with: no token is older."""
        self.jobs: list[asyncio.Future[Episode]] = []
        self.order: list[asyncio.Future[Episode]] = []
        """Those that are done, the first first."""
        self.timer: asyncio.TimerHandle | None = None
        self.expired = False

    def add(self, job: asyncio.Future[Episode]) -> None:
        self.jobs.append(job)
        job.add_done_callback(self.order.append)

    def begin(self) -> None:
        self.begun += 1
        self.since = self.version() if self.since is None else self.since
        if self.seconds is not None and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(self.seconds, self._expire)

    async def wait(self, size: int, patient: bool) -> None:
        """Until all are done; or, impatiently, until so many have finished without failing."""
        pending = set(self.jobs)
        when = asyncio.FIRST_EXCEPTION if patient else asyncio.FIRST_COMPLETED
        while pending and not any(_broke(job) for job in self.order) and (patient or len(self._whole()) < size):
            _, pending = await asyncio.wait(pending, return_when=when)
            await asyncio.sleep(0)  # one that finished in the same moment is no longer pending, and not yet in `order`

    def counted(self, size: int) -> list[Episode]:
        """The members that count, by number: the first to finish; and those that failed, to be reported."""
        first = {id(job) for job in self._whole()[:size]}
        done = [job for job in self.jobs if job.done() and not job.cancelled()]
        return [job.result() for job in done if id(job) in first or job.result().failure is not None]

    def failed(self) -> list[Episode]:
        """Those that have finished, and failed."""
        done = [job.result() for job in self.jobs if job.done() and not job.cancelled() and not job.exception()]
        return [episode for episode in done if episode.failure is not None]

    def _whole(self) -> list[asyncio.Future[Episode]]:
        return [job for job in self.order if not job.cancelled() and job.result().failure is None]

    def _expire(self) -> None:
        self.expired = True
        self._cancel()

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self._cancel()

    def _cancel(self) -> None:
        for job in self.jobs:
            if not job.done():
                LEAVING.add(job)
                job.add_done_callback(LEAVING.discard)
                job.cancel()


def _broke(job: asyncio.Future[Episode]) -> bool:
    """A defect, and no failure of the episode: the batch ends with it."""
    return not job.cancelled() and job.exception() is not None


def divided(sources: Sequence[str], count: int) -> tuple[list[int], dict[str, deque[int]]]:
    """The places to fill, and each source's spares: every source has the share of `count` that it has of the tasks.

    Example:
        divided(["a", "b", "a", "b", "a", "a"], 3)     # ([0, 1, 2], {"a": deque([4, 5]), "b": deque([3])})
    """
    members: dict[str, list[int]] = {}
    for place, source in enumerate(sources):
        members.setdefault(source, []).append(place)
    shares = {source: Fraction(len(own) * count, len(sources)) for source, own in members.items()}
    quota = {source: int(share) for source, share in shares.items()}
    by_need = sorted(shares, key=lambda source: quota[source] - shares[source])
    for source in by_need[: count - sum(quota.values())]:
        quota[source] += 1
    places = sorted(place for source, own in members.items() for place in own[: quota[source]])
    return places, {source: deque(own[quota[source] :]) for source, own in members.items()}


def spares_of(tasks: Mapping[int, Task], numbers: Iterable[int]) -> dict[str, deque[int]]:
    """These spares by source; of sources that have none left, too."""
    found: dict[str, deque[int]] = {task.source: deque() for task in tasks.values()}
    for number in numbers:
        found[tasks[number].source].append(number)
    return found


COUNTED = (
    "cancelled",
    "expired",
    "filtered",
    "filtered_episodes",
    "filtered_failed",
    "filter_failed",
    "missing",
    "again",
)


def named(counts: Counter[str]) -> Metrics:
    """The counts as metrics, those too that are 0: a column that comes and goes is no curve."""
    return {f"rollout/{name}": float(counts[name]) for name in COUNTED} | {
        "rollout/dropped_stale": float(counts["stale"])
    }
