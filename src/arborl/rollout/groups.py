"""Groups of a batch: their episodes, the group filter and the replacement of groups that the filter drops.

A group is one task with several episodes. The episodes share the task and its environment seed and run independently.
Without redundancy a group is complete when all episodes are finished. With redundancy it is complete when enough
episodes are finished; the others are cancelled and enter neither the baseline nor the loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

from arborl.errors import RunStopped
from arborl.registry import Registry
from arborl.rollout.accounting import FILTERED, GROUP_TIMEOUT, REDUNDANT, EpisodeAccounting, GroupPlace
from arborl.seeds import derive
from arborl.types import NOT_SAMPLED, Episode, Group, Metrics, Task

log = logging.getLogger(__name__)

PlayEpisode = Callable[[Task, int, str, Callable[[], None]], Awaitable[Episode]]
"""Runs one episode: task, seed, episode id, and a function to call when the episode starts."""
GroupFilter = Callable[[Group], bool]

UNSAMPLED = -1
"""Version of groups without sampled tokens: they count as oldest and are never stale."""


def varied(group: Group) -> bool:
    """The rewards differ, so the advantages are not all 0 (dynamic sampling of DAPO)."""
    return len({episode.reward for episode in group.valid_episodes}) > 1


def solvable(group: Group) -> bool:
    return any(episode.metrics.get("success", 0.0) >= 1 for episode in group.valid_episodes)


FILTERS = Registry(
    "group filter", {"varied": "arborl.rollout.groups:varied", "solvable": "arborl.rollout.groups:solvable"}
)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How groups are collected. The default waits for all episodes and keeps every group."""

    redundancy: int = 0
    """Extra episodes of a group; the first to finish count."""
    seconds: float | None = None
    """Timeout of a group, from the start of its first episode. Finished episodes count."""
    keep: GroupFilter | None = None
    """Filter of scored groups. A dropped group is replaced while there are spare tasks."""
    judge: Callable[[Episode], Awaitable[None]] | None = None
    """Computes the rewards of one episode when it ends. The episode is finished when this returns."""
    score: Callable[[Sequence[Group]], Awaitable[None]] | None = None


DEFAULT_OPTIONS = GroupOptions()


class EpisodeObserver(Protocol):
    """Receives the start and the end of episodes while a batch is collected. Raises `RunStopped` to end the run."""

    def on_start(self, task: Task) -> None: ...

    def on_end(self, episode: Episode) -> None:
        """The episode has ended, with its rewards if they are computed during collection."""
        ...


@dataclass(slots=True, eq=False)
class BatchSlot:
    """One group of a batch that is to be collected: from its task, or from a spare task if the group is dropped."""

    batch: int
    at: int
    tasks: Mapping[int, Task]
    spares: deque[int]
    """Indices of spare tasks of the same source, shared by all slots of that source."""
    seed: int
    is_whole: bool = False
    """Whether the slot stands for all groups of a batch that is not sampled group by group."""
    attempt: int = 0
    """How often the group was restarted because its tokens were too old."""
    running: RunningGroup | None = None
    version: Callable[[], int] = lambda: 0
    job: asyncio.Task[list[Group]] | None = None
    """Collects one group; none if no spare task is left; or all groups of a batch that is not sampled."""

    @property
    def task(self) -> Task:
        return self.tasks[self.at]

    @property
    def start_version(self) -> int | None:
        """Policy version at the start of the group; no token is older."""
        return self.running.start_version if self.running is not None else None

    @property
    def is_finished(self) -> bool:
        return self.job is not None and self.job.done()

    @property
    def groups(self) -> list[Group]:
        assert self.job is not None
        return self.job.result()

    @property
    def order(self) -> tuple[int, int]:
        return self.batch, self.at

    @property
    def places(self) -> list[GroupPlace]:
        """The groups of the slot in the accounting; of groups that were not sampled the index is negative."""
        size = len(self.tasks)
        return [(self.batch, at) for at in range(-size, size)] if self.is_whole else [self.order]

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the tokens of the finished groups, as reported by the engine."""
        calls = [call.completion for group in self.groups for episode in group.valid_episodes for call in episode.calls]
        return min((done.oldest for done in calls if done.tokens and done.version != NOT_SAMPLED), default=UNSAMPLED)

    def cancel(self) -> None:
        job, running, self.job, self.running = self.job, self.running, None, None
        if running is not None:
            running.close()  # at once: none of its episodes starts after the group is dropped
        if job is not None and not job.done():
            cancel_in_background(job)


CANCELLED_TASKS: set[asyncio.Future[Any]] = set()
"""Cancelled episodes and groups that still close their environments. asyncio keeps only weak references to tasks."""


def cancel_in_background(job: asyncio.Future[Any]) -> None:
    CANCELLED_TASKS.add(job)
    job.add_done_callback(CANCELLED_TASKS.discard)
    job.cancel()


def batch_slots(tasks: Sequence[Task], seed: int, count: int | None = None, batch: int = 0) -> list[BatchSlot]:
    chosen, spares = split_spares([task.source for task in tasks], len(tasks) if count is None else count)
    numbered = dict(enumerate(tasks))
    return [BatchSlot(batch, at, numbered, spares[tasks[at].source], seed) for at in chosen]


class GroupCollector:
    def __init__(
        self,
        play: PlayEpisode,
        options: GroupOptions,
        counts: Counter[str],
        dropped_failures: list[Episode] | None = None,
        observer: EpisodeObserver | None = None,
        accounting: EpisodeAccounting | None = None,
    ):
        self.observer, self.accounting = observer, accounting
        self.play, self.options, self.counts = play, options, counts
        self.dropped_failures = [] if dropped_failures is None else dropped_failures

    async def collect(
        self, tasks: Sequence[Task], seed: int, size: int, count: int | None = None, batch: int = 0
    ) -> list[Group]:
        """The groups of `count` tasks, in the order of the tasks; the other tasks are spares. The next spare of the
        same source replaces a dropped group, so the batch keeps its mixture. Spares are used in their order, one for
        each dropped group, so the result does not depend on the order in which groups finish."""
        slots = batch_slots(tasks, seed, count, batch)
        try:
            async with asyncio.TaskGroup() as running:
                jobs = [running.create_task(self.fill(slot, size)) for slot in slots]
        except BaseExceptionGroup as errors:
            if (stopped := errors.split(RunStopped)[0]) is not None:
                raise stopped.exceptions[0] from None  # by the observer
            raise
        results = sorted(zip(slots, jobs, strict=True), key=lambda pair: pair[0].at)
        return [group for _, job in results if (group := job.result()) is not None]

    async def fill(self, slot: BatchSlot, size: int) -> Group | None:
        """The group of one slot, or that of a spare task; None if no spare is left."""
        while True:
            group = await self._group(slot, size)
            if await self._is_kept(group):
                return group
            failed = [episode for episode in group.episodes if episode.failure is not None]
            self.dropped_failures += failed
            self.counts.update(filtered=1, filtered_episodes=len(group.episodes), filtered_failed=len(failed))
            if self.accounting is not None:
                self.accounting.drop(slot.batch, slot.at, FILTERED)
            if not slot.spares:
                self.counts["missing"] += 1
                return None
            slot.at = slot.spares.popleft()

    async def _is_kept(self, group: Group) -> bool:
        options = self.options
        if options.score is not None:
            await options.score([group])
        if options.keep is None:
            return True
        try:
            return bool(options.keep(group))
        except Exception:
            log.exception("the group filter failed on task %s; the group is kept", group.task.id)
            self.counts["filter_failed"] += 1
            return True

    async def _group(self, slot: BatchSlot, size: int) -> Group:
        """Run the episodes of a task until enough are finished. A restarted group has other seeds and ids, and one
        redundant episode because the update waits for it."""
        task, suffix = slot.task, ("again", slot.attempt) if slot.attempt else ()
        redundancy = self.options.redundancy + (1 if slot.attempt else 0)
        running = slot.running = RunningGroup(self.options.seconds, slot.version)
        for number in range(size + redundancy):
            seed = derive(slot.seed, "task", slot.at, "episode", number, *suffix)
            name = f"{task.id}#{number}" + (f"+{slot.attempt}" if slot.attempt else "")
            running.add(asyncio.ensure_future(self._episode(slot, running, seed, name)))
        try:
            await running.wait(size, wait_for_all=not redundancy)
        finally:
            running.close()
        counted = running.counted(size)
        self.counts["expired"] += running.is_expired
        self.counts["cancelled"] += len(running.jobs) - len(counted)
        if self.accounting is not None:
            why = GROUP_TIMEOUT if running.is_expired else REDUNDANT
            self.accounting.complete(slot.batch, slot.at, counted, why)
        return Group(task, counted)

    async def _episode(self, slot: BatchSlot, running: RunningGroup, seed: int, name: str) -> Episode:
        batch, at = slot.order
        episode = await self.play(slot.task, seed, name, partial(self._on_start, batch, at, running, seed, name))
        if self.options.judge is not None:
            await self.options.judge(episode)
        if self.accounting is not None:
            self.accounting.end(batch, at, episode)
        if self.observer is not None:
            self.observer.on_end(episode)
        return episode

    def _on_start(self, batch: int, at: int, running: RunningGroup, seed: int, name: str) -> None:
        running.on_start()
        if self.accounting is not None:
            self.accounting.start(batch, at, (name, seed))


class RunningGroup:
    """The episodes of a group while they run. The timeout starts with the first episode."""

    def __init__(self, seconds: float | None, version: Callable[[], int] = lambda: 0):
        self.seconds, self.version = seconds, version
        self.num_started = 0
        self.start_version: int | None = None
        """Policy version when the first episode started; no token is older."""
        self.jobs: list[asyncio.Future[Episode]] = []
        self.finished: list[asyncio.Future[Episode]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.is_expired = False

    def add(self, job: asyncio.Future[Episode]) -> None:
        self.jobs.append(job)
        job.add_done_callback(self.finished.append)

    def on_start(self) -> None:
        self.num_started += 1
        self.start_version = self.version() if self.start_version is None else self.start_version
        if self.seconds is not None and self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(self.seconds, self._expire)

    async def wait(self, size: int, wait_for_all: bool) -> None:
        """Wait for all episodes, or until `size` of them have finished without a failure."""
        pending = set(self.jobs)
        when = asyncio.FIRST_EXCEPTION if wait_for_all else asyncio.FIRST_COMPLETED
        while pending and not any(map(_has_raised, self.finished)) and (wait_for_all or len(self._whole()) < size):
            _, pending = await asyncio.wait(pending, return_when=when)
            await asyncio.sleep(0)  # a job that finished just now is not in `finished` yet

    def counted(self, size: int) -> list[Episode]:
        """The episodes of the group by number: the first `size` that finished, and the failed ones."""
        first = {id(job) for job in self._whole()[:size]}
        done = [job for job in self.jobs if job.done() and not job.cancelled()]
        return [job.result() for job in done if id(job) in first or job.result().failure is not None]

    def failed(self) -> list[Episode]:
        done = [job.result() for job in self.jobs if job.done() and not job.cancelled() and not job.exception()]
        return [episode for episode in done if episode.failure is not None]

    def _whole(self) -> list[asyncio.Future[Episode]]:
        return [job for job in self.finished if not job.cancelled() and job.result().failure is None]

    def _expire(self) -> None:
        self.is_expired = True
        self._cancel()

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self._cancel()

    def _cancel(self) -> None:
        for job in self.jobs:
            if not job.done():
                cancel_in_background(job)


def _has_raised(job: asyncio.Future[Episode]) -> bool:
    """A defect, not a failed episode: it ends the batch."""
    return not job.cancelled() and job.exception() is not None


def split_spares(sources: Sequence[str], count: int) -> tuple[list[int], dict[str, deque[int]]]:
    """Indices of `count` tasks in the proportions of the sources, and the spare tasks of each source.

    Example:
        split_spares(["a", "b", "a", "b", "a", "a"], 3)     # ([0, 1, 2], {"a": deque([4, 5]), "b": deque([3])})
    """
    members: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        members.setdefault(source, []).append(index)
    shares = {source: Fraction(len(indices) * count, len(sources)) for source, indices in members.items()}
    quota = {source: int(share) for source, share in shares.items()}
    by_remainder = sorted(shares, key=lambda source: quota[source] - shares[source])
    for source in by_remainder[: count - sum(quota.values())]:
        quota[source] += 1
    chosen = sorted(index for source, indices in members.items() for index in indices[: quota[source]])
    return chosen, {source: deque(indices[quota[source] :]) for source, indices in members.items()}


def spares_by_source(tasks: Mapping[int, Task], indices: Iterable[int]) -> dict[str, deque[int]]:
    """The spare tasks of every source; sources without spares have an empty queue."""
    spares: dict[str, deque[int]] = {task.source: deque() for task in tasks.values()}
    for index in indices:
        spares[tasks[index].source].append(index)
    return spares


COUNTED = (
    "cancelled", "expired", "filtered", "filtered_episodes", "filtered_failed", "filter_failed", "missing", "retried",
)  # fmt: skip


def count_metrics(counts: Counter[str]) -> Metrics:
    """The counts as metrics. Zeros are included so that every step has the same columns."""
    return {f"rollout/{name}": float(counts[name]) for name in COUNTED} | {
        "rollout/dropped_stale": float(counts["stale"])
    }
