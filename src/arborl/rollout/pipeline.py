"""Groups are sampled ahead of the updates that train on them, within a bound on the staleness of a token.

Batch k holds the groups of update k. It starts once the weights have version k - `max_lag`; an earlier start could
exceed the bound. So `max_lag + 1` batches are in progress, and an update takes as many finished groups as its batch has
slots, from whichever batch. Slow groups are carried over to the next update.

A group that would be too old for the next update and is unfinished is restarted once; the update then waits for it, so
slow tasks are not excluded. With `max_lag=0` there is one batch and the update waits for all of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from arborl.data.task_source import TaskSource
from arborl.rollout.accounting import STALE, GroupPlace
from arborl.rollout.episode_store import json_line, task_from_json, task_to_json
from arborl.rollout.groups import UNSAMPLED, BatchSlot, batch_slots, spares_by_source
from arborl.rollout.runner import Rollout
from arborl.seeds import derive
from arborl.types import Group


@dataclass(slots=True)
class PipelineBatch:
    """A batch: how many slots its update trains on, and the slots that are not trained yet."""

    size: int
    slots: list[BatchSlot] = field(default_factory=list)


class Pipeline:
    """Batches between rollout and learner.

    Args:
        last: number of updates; no batch beyond it is started.
        size: episodes of a group.
        count: groups of a batch.
        spares: spare tasks of a batch.
        max_lag: largest staleness of a token when it is trained on, in policy versions.

    Example:
        await pipeline.begin(version=3)          # start the batches that these weights may sample
        groups = await pipeline.take(step=3)     # groups of the update
        pipeline.trained()                       # the update is done
    """

    def __init__(
        self,
        rollout: Rollout,
        source: TaskSource,
        seed: int,
        last: int,
        size: int,
        count: int,
        spares: int = 0,
        max_lag: int = 0,
    ):
        self.rollout, self.source, self.seed, self.last = rollout, source, seed, last
        self.size, self.count, self.spares, self.max_lag = size, count, spares, max_lag
        self.version = 0
        self.next = 0
        """The first batch that was never started."""
        self.first_untrained = 0
        """The first batch with no trained slot and no trained slot after it."""
        self.batches: dict[int, PipelineBatch] = {}
        self.taken: list[BatchSlot] = []
        """Slots that `take` returned and `trained` has not confirmed."""

    @property
    def slots(self) -> list[BatchSlot]:
        return [slot for batch in self.batches.values() for slot in batch.slots]

    @property
    def busy(self) -> bool:
        return any(slot.job is not None and not slot.job.done() for slot in self.slots)

    async def begin(self, version: int) -> None:
        """Start all batches that weights of this version may sample, and the groups that must be restarted."""
        self.version = version
        while self.next < min(version + self.max_lag + 1, self.last):
            await self._open(self.next)
            self.next += 1
        for slot in self.slots:
            if slot.job is None:
                slot.job = asyncio.ensure_future(self._fill(slot))

    async def take(self, step: int) -> list[Group]:
        await self.begin(step)
        with self.rollout.running():
            while (chosen := self._choose(step)) is None:
                running = [slot.job for slot in self.slots if slot.job is not None and not slot.job.done()]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        self.taken = chosen
        for batch in self.batches.values():
            batch.slots = [slot for slot in batch.slots if slot not in chosen]
        for slot in self._expiring(step):
            self._restart(slot)
        return [group for slot in sorted(chosen, key=lambda slot: slot.order) for group in slot.groups]

    def trained(self) -> None:
        """Confirm that the update has trained on the taken groups."""
        self.first_untrained = max([self.first_untrained, *(slot.batch + 1 for slot in self.taken)])
        self.taken = []
        self.batches = {number: batch for number, batch in self.batches.items() if batch.slots or number > self.version}
        self.rollout.accounting.close_batches(before=min((slot.batch for slot in self.slots), default=self.next))

    def open_places(self) -> set[GroupPlace]:
        """The groups that are collected, or wait for an update."""
        return {place for slot in self.slots for place in slot.places}

    async def close(self) -> None:
        """Cancel what is running. Slots that were not trained stay in the state."""
        jobs = [slot.job for slot in self.slots if slot.job is not None]
        for slot in self.slots:
            slot.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    async def _open(self, number: int) -> None:
        tasks = self.source.take(number, self.count + self.spares)
        seed = derive(self.seed, "step", number)
        if self.rollout.is_whole_batch(tasks):  # offline, or recorded
            slots = [BatchSlot(number, 0, dict(enumerate(tasks)), deque(), seed, is_whole=True)]
        else:
            await self.rollout.probe_envs(tasks)
            slots = batch_slots(tasks, seed, self.count, number)
        self.batches[number] = PipelineBatch(len(slots), slots)

    async def _fill(self, slot: BatchSlot) -> list[Group]:
        slot.version = lambda: self.version
        if slot.is_whole:
            tasks = list(slot.tasks.values())
            groups = await self.rollout.train(tasks, slot.seed, self.size, self.count, batch=slot.batch)
            self.rollout.accounting.add(slot.batch, groups)
            return groups
        group = await self.rollout.collector().fill(slot, self.size)
        return [] if group is None else [group]

    def _expiring(self, step: int) -> list[BatchSlot]:
        return [
            slot for slot in self.slots if slot.start_version is not None and slot.start_version <= step - self.max_lag
        ]

    def _choose(self, step: int) -> list[BatchSlot] | None:
        """The slots that this update trains on, oldest first; None while it has to wait."""
        finished = []
        for slot in self.slots:
            if slot.is_finished and UNSAMPLED < slot.oldest_version < step - self.max_lag:  # the engine lagged behind
                self._restart(slot)
                slot.job = asyncio.ensure_future(self._fill(slot))
            elif slot.is_finished:
                finished.append(slot)
        size = self.batches[step].size
        is_late = any(not slot.is_finished for slot in self._expiring(step) if slot.attempt)
        if len(finished) < size or is_late:
            return None

        def age(slot: BatchSlot) -> tuple[int, int, tuple[int, int]]:
            return (UNSAMPLED if slot.start_version is None else slot.start_version, -slot.attempt, slot.order)

        return sorted(finished, key=age)[:size]

    def _restart(self, slot: BatchSlot) -> None:
        """Drop a group whose tokens are, or will be, too old; its slot is filled again."""
        if slot.running is not None:
            self.rollout.dropped_failures += slot.running.failed()
        slot.cancel()
        self.rollout.counts["stale"] += sum(self.rollout.accounting.drop(*place, STALE) for place in slot.places)
        self.rollout.counts["retried"] += 1
        slot.attempt += 1

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the untrained slots of batches that are trained in part. They start again."""
        untrained: dict[int, list[BatchSlot]] = {}
        for slot in sorted([*self.slots, *self.taken], key=lambda slot: slot.order):
            if slot.batch < self.first_untrained:
                untrained.setdefault(slot.batch, []).append(slot)
        sizes = {str(number): batch.size for number, batch in self.batches.items() if number < self.first_untrained}
        left = [_batch_state(number, slots) for number, slots in untrained.items()]
        return {"next": self.first_untrained, "sizes": sizes, "left": left}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Continue from what `state` returned; from a whole batch if it is empty."""
        self.next = self.first_untrained = int(state.get("next", step))
        self.batches = {int(number): PipelineBatch(int(size)) for number, size in state.get("sizes", {}).items()}
        for row in state.get("left", ()):
            number = int(row["batch"])
            seed = derive(self.seed, "step", number)
            tasks = {int(at): task_from_json(task) for at, task in row["tasks"].items()}
            spares = spares_by_source(tasks, row["spares"])
            slots = [
                BatchSlot(number, at, tasks, spares[tasks[at].source], seed, attempt=attempt)
                for at, attempt in row["places"]
            ]
            self.batches.setdefault(number, PipelineBatch(len(slots))).slots = slots
        self.batches = {number: batch for number, batch in self.batches.items() if number >= step or batch.slots}


def _batch_state(number: int, slots: list[BatchSlot]) -> dict[str, Any]:
    spares = sorted({at for slot in slots for at in slot.spares})
    needed = {at: slots[0].tasks[at] for at in (*(slot.at for slot in slots), *spares)}
    return {
        "batch": number,
        "places": [[slot.at, slot.attempt] for slot in slots],
        "spares": spares,
        "tasks": {str(at): json.loads(json_line(task_to_json(task))) for at, task in needed.items()},
    }
