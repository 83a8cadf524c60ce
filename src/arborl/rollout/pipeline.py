"""Groups are played ahead of the updates that train on them, within a bound on how old a token may be.

Batch k holds the places of update k. It is begun once the weights have version k - `max_lag`: earlier, its groups could
not be sure to be trained in time. So `max_lag + 1` batches are in play, and an update takes as many groups as its batch
has places from those that are finished, whichever batch they are of; who is slow is carried over to the next.

A group grows old while others overtake it. One that would be too old for the next update, and is not finished for this,
is begun again; the second time it is waited for, so no task is left out for being slow. With `max_lag=0` there is one
batch, and all of it is waited for.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from arborl.data.source import TaskSource
from arborl.rollout.groups import LEAVING, Place, places_of, spares_of
from arborl.rollout.runner import Rollout
from arborl.rollout.store import dumps, task_from, task_to
from arborl.seeds import derive
from arborl.types import NOT_SAMPLED, Group

BEFORE = -1
"""The version of what is not sampled: it is as good as the oldest, and never too old."""
Outcome = list[Group]
"""What became of a place: a group; none, where spares ran out; or all groups of a batch that is not played."""


@dataclass(slots=True, eq=False)
class Seat:
    """A place in play."""

    place: Place
    job: asyncio.Task[Outcome] | None = None

    @property
    def begun(self) -> int | None:
        """The version that its group began with: none of its tokens is older."""
        return self.place.opened.since if self.place.opened is not None else None

    @property
    def finished(self) -> bool:
        return self.job is not None and self.job.done()

    @property
    def groups(self) -> Outcome:
        assert self.job is not None
        return self.job.result()

    @property
    def order(self) -> tuple[int, int]:
        return self.place.batch, self.place.at

    @property
    def oldest(self) -> int:
        """The oldest version among the tokens of its finished groups, by what the engine says."""
        calls = [call.completion for group in self.groups for episode in group.valid_episodes for call in episode.calls]
        return min((said.oldest for said in calls if said.tokens and said.version != NOT_SAMPLED), default=BEFORE)

    def leave(self) -> None:
        """Nobody waits for it any more."""
        job, self.job, self.place.opened = self.job, None, None
        if job is not None and not job.done():
            LEAVING.add(job)
            job.add_done_callback(LEAVING.discard)
            job.cancel()


@dataclass(slots=True)
class Batch:
    """What an update is owed: as many finished places as its batch had."""

    size: int
    seats: list[Seat] = field(default_factory=list)
    """Those not trained yet."""


class Pipeline:
    """What lies between rollout and learner.

    Args:
        rollout: plays.
        source: of the tasks.
        seed: of the run.
        last: updates in all; no batch is begun beyond.
        size: episodes of a group.
        count: groups of a batch.
        spares: tasks beyond those.
        max_lag: versions that a token may be older than the weights it is trained on.

    Example:
        await pipeline.begin(version=3)          # what may be begun with these weights
        groups = await pipeline.take(step=3)     # what to train on
        pipeline.trained()                       # it is
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
        """The first batch that was never begun."""
        self.reached = 0
        """The first batch of which nothing was trained, nor of any after it."""
        self.batches: dict[int, Batch] = {}
        self.taken: list[Seat] = []
        """Handed out, and not yet trained."""

    @property
    def seats(self) -> list[Seat]:
        return [seat for batch in self.batches.values() for seat in batch.seats]

    @property
    def busy(self) -> bool:
        """Whether anything is in play."""
        return any(seat.job is not None and not seat.job.done() for seat in self.seats)

    async def begin(self, version: int) -> None:
        """Begin what may be begun with these weights: whole batches, and groups that were too old for others."""
        self.version = version
        while self.next < min(version + self.max_lag + 1, self.last):
            await self._open(self.next)
            self.next += 1
        for seat in self.seats:
            if seat.job is None:
                seat.job = asyncio.ensure_future(self._fill(seat))

    async def take(self, step: int) -> list[Group]:
        """The groups of this update, in the order of their tasks."""
        await self.begin(step)
        with self.rollout.playing():
            while (chosen := self._chosen(step)) is None:
                playing = [seat.job for seat in self.seats if seat.job is not None and not seat.job.done()]
                await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
        self.taken = chosen
        for batch in self.batches.values():
            batch.seats = [seat for seat in batch.seats if seat not in chosen]
        for seat in self._due(step):
            self._drop(seat)
        return [group for seat in sorted(chosen, key=lambda seat: seat.order) for group in seat.groups]

    def trained(self) -> None:
        """What was taken is learned from, and will not be again."""
        self.reached = max([self.reached, *(seat.place.batch + 1 for seat in self.taken)])
        self.taken = []
        self.batches = {number: batch for number, batch in self.batches.items() if batch.seats or number > self.version}

    async def close(self) -> None:
        """End what is in play. What was not trained stays on the list of what is to be."""
        jobs = [seat.job for seat in self.seats if seat.job is not None]
        for seat in self.seats:
            seat.leave()
        await asyncio.gather(*jobs, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ in play

    async def _open(self, number: int) -> None:
        tasks = self.source.take(number, self.count + self.spares)
        seed = derive(self.seed, "step", number)
        if self.rollout.whole(tasks):  # given, or on tape
            places = [Place(number, 0, dict(enumerate(tasks)), deque(), seed)]
        else:
            await self.rollout.meet(tasks)
            places = places_of(tasks, seed, self.count, number)
        self.batches[number] = Batch(len(places), [Seat(place) for place in places])

    async def _fill(self, seat: Seat) -> Outcome:
        place = seat.place
        place.version = lambda: self.version
        tasks = list(place.tasks.values())
        if self.rollout.whole(tasks):
            return await self.rollout.train(tasks, place.seed, self.size, self.count)
        group = await self.rollout.manager().fill(place, self.size)
        return [] if group is None else [group]

    def _due(self, step: int) -> list[Seat]:
        """Those that will be too old for the next update."""
        return [seat for seat in self.seats if seat.begun is not None and seat.begun <= step - self.max_lag]

    def _chosen(self, step: int) -> list[Seat] | None:
        """Whom this update trains on, the oldest first; None while it has to wait."""
        finished = []
        for seat in self.seats:
            if seat.finished and BEFORE < seat.oldest < step - self.max_lag:  # an engine's weights were behind
                self._drop(seat)
                seat.job = asyncio.ensure_future(self._fill(seat))
            elif seat.finished:
                finished.append(seat)
        owed = self.batches[step].size
        late = any(not seat.finished for seat in self._due(step) if seat.place.attempt)
        if len(finished) < owed or late:
            return None
        finished.sort(key=lambda seat: (BEFORE if seat.begun is None else seat.begun, -seat.place.attempt, seat.order))
        return finished[:owed]

    def _drop(self, seat: Seat) -> None:
        """Its tokens are, or would be, too old: its group is to be begun again."""
        opened = seat.place.opened
        if opened is not None:
            self.rollout.counts["stale"] += opened.begun
            self.rollout.lost += opened.failed()
        self.rollout.counts["again"] += 1
        seat.leave()
        seat.place.attempt += 1

    # ------------------------------------------------------------------------------------------ to be gone on from

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember: of batches that were trained in part, what is left of them. It is begun
        again, and what was trained is not."""
        left: dict[int, list[Seat]] = {}
        for seat in sorted([*self.seats, *self.taken], key=lambda seat: seat.order):
            if seat.place.batch < self.reached:
                left.setdefault(seat.place.batch, []).append(seat)
        sizes = {str(number): batch.size for number, batch in self.batches.items() if number < self.reached}
        return {"next": self.reached, "sizes": sizes, "left": [_left(number, own) for number, own in left.items()]}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Go on from what `state` said; without one, from a whole batch."""
        self.next = self.reached = int(state.get("next", step))
        self.batches = {int(number): Batch(int(size)) for number, size in state.get("sizes", {}).items()}
        for row in state.get("left", ()):
            number = int(row["batch"])
            seed = derive(self.seed, "step", number)
            tasks = {int(at): task_from(task) for at, task in row["tasks"].items()}
            spares = spares_of(tasks, row["spares"])
            places = [
                Place(number, at, tasks, spares[tasks[at].source], seed, attempt) for at, attempt in row["places"]
            ]
            self.batches.setdefault(number, Batch(len(places))).seats = [Seat(place) for place in places]
        self.batches = {number: batch for number, batch in self.batches.items() if number >= step or batch.seats}


def _left(number: int, seats: list[Seat]) -> dict[str, Any]:
    """What is left of a batch: the places, and the spares that nobody has had."""
    places = [seat.place for seat in seats]
    spares = sorted({at for place in places for at in place.spares})
    needed = {at: places[0].tasks[at] for at in (*(place.at for place in places), *spares)}
    return {
        "batch": number,
        "places": [[place.at, place.attempt] for place in places],
        "spares": spares,
        "tasks": {str(at): json.loads(dumps(task_to(task))) for at, task in needed.items()},
    }
