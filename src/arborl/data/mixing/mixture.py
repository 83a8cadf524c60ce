"""Several sources in every batch, in exact shares.

Where a mixture stands is a few numbers a source (`Place`). They follow from the steps before, so a run can also be
taken up without them as long as batches had one size; with them, whatever happened is gone on from exactly.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from arborl.data.mixing.schedule import ZERO, deal, exact
from arborl.data.mixing.streams import Pool
from arborl.data.source import TaskSource
from arborl.errors import ConfigError
from arborl.seeds import generator
from arborl.types import Group, Metrics, Task

log = logging.getLogger(__name__)

REMEMBERED = 64
"""Steps whose places are kept, to be asked for again or saved late."""


@dataclass(frozen=True, slots=True)
class Band:
    """Sources whose success is outside `low` to `high` have their ratios multiplied by `outside`."""

    low: float = 0.0
    high: float = 1.0
    outside: float = 0.25
    decay: float = 0.9
    """How much of the measured success survives a step."""

    @property
    def active(self) -> bool:
        return self.low > 0 or self.high < 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a mixture stands before a step."""

    step: int = 0
    drawn: Mapping[str, int] = field(default_factory=dict)
    """Tasks taken of each source so far."""
    behind: Mapping[str, Fraction] = field(default_factory=dict)
    """Rows each source has had too few, since sources last left."""


class Mixture(TaskSource):
    """Takes every batch from several pools.

    Args:
        pools: the sources.
        ratios: of each; need not add up to 1.
        seed: the run's.
        passes: times a source may be used up, where that is limited.
        schedule: from a step on, other ratios for some sources.
        band: less of what is too easy or too hard.
        refuse: whether a source whose passes are used up ends the run, instead of leaving its place to the others.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        ratios: Mapping[str, float | Fraction],
        seed: int,
        passes: Mapping[str, int] | None = None,
        schedule: Sequence[tuple[int, Mapping[str, float]]] = (),
        band: Band | None = None,
        refuse: bool = True,
    ):
        self.pools = {pool.name: pool for pool in pools}
        self.ratios: dict[str, float | Fraction] = dict(ratios)
        self.seed, self.passes, self.schedule = seed, dict(passes or {}), list(schedule)
        self.band, self.refuse = band or Band(), refuse
        self.success: dict[str, float] = {}
        self._places: OrderedDict[int, Place] = OrderedDict([(0, Place())])
        self._last: Counter[str] = Counter()

    # -------------------------------------------------------------------------------------------- the trainer's side

    def take(self, step: int, count: int) -> list[Task]:
        place = self._reach(step, count)
        counts = self._counts(place, count)
        self._remember(self._after(place, counts, count))
        self._last = Counter(counts)
        tasks = [
            task for name, number in counts.items() for task in self.pools[name].take(place.drawn.get(name, 0), number)
        ]
        if len(self.pools) > 1:  # so that a part of a batch holds all sources
            order = generator(self.seed, "batch", step).permutation(len(tasks))
            tasks = [tasks[int(index)] for index in order]
        return _named_apart(tasks)

    def evaluation(self, count: int) -> list[Task]:
        """As many of each source as there are, up to equal shares; what one lacks the others give."""
        offered = [self.pools[name].evaluation(count) for name in self._used()]
        chosen: list[Task] = []
        for turn in range(count):
            for tasks in offered:
                if turn < len(tasks) and len(chosen) < count:
                    chosen.append(tasks[turn])
        return sorted(chosen, key=lambda task: list(self.pools).index(task.source))

    def steps(self, passes: int, count: int) -> int:
        """Of several sources a pass is as many tasks as those that are used have rows together."""
        rows = 0
        for name in self._used():
            size = self.pools[name].size
            if size is None:
                raise ConfigError(
                    f"trainer.epochs={passes}: the tasks of {name} have no end to pass. Write trainer.steps."
                )
            rows += size
        return max(1, -(-passes * rows // count))

    def _used(self) -> list[str]:
        return [name for name in self.pools if any(ratios.get(name, 0) for ratios in (self.ratios, *self._stages()))]

    def observe(self, step: int, groups: Sequence[Group]) -> Metrics:
        for name in self.pools:
            now = success_of(name, groups)
            if now is not None:
                before = self.success.get(name, now)
                self.success[name] = self.band.decay * before + (1 - self.band.decay) * now
        return self.metrics(step, groups)

    def state(self, step: int) -> dict[str, Any]:
        place = self._places.get(step) or self._reach(step, sum(self._last.values()))
        behind = {name: str(value) for name, value in place.behind.items()}
        return {"step": place.step, "drawn": dict(place.drawn), "behind": behind, "success": dict(self.success)}

    def load_state(self, state: dict[str, Any]) -> None:
        if not state:
            return
        unknown = [name for name in state["drawn"] if name not in self.pools]
        if unknown:
            raise ConfigError(
                f"data.sources: the checkpoint was made with a source {unknown[0]!r}, which is not there any more. "
                f"Write data.sources.{unknown[0]}.ratio=0 to go on without it."
            )
        behind = {name: Fraction(value) for name, value in state["behind"].items()}
        self.success = dict(state["success"])
        self._remember(Place(state["step"], dict(state["drawn"]), behind))

    def start_at(self, step: int) -> None:
        """Nothing is taken before this step."""
        self._places = OrderedDict([(step, Place(step))])

    # -------------------------------------------------------------------------------------------- the schedule

    def _stages(self) -> list[Mapping[str, float]]:
        return [changed for _, changed in self.schedule]

    def shares(self, step: int) -> dict[str, float | Fraction]:
        """The ratios in force at a step, before any source is used up."""
        ratios = dict(self.ratios)
        for begin, changed in self.schedule:
            if begin <= step:
                ratios |= changed
        if self.band.active:
            for name, success in self.success.items():
                if not self.band.low <= success <= self.band.high:
                    ratios[name] = Fraction(str(ratios[name])) * Fraction(str(self.band.outside))
        return ratios

    def _reach(self, step: int, count: int) -> Place:
        """The place before a step: remembered, or reached from an earlier one in batches of this size."""
        earlier = [at for at in self._places if at <= step]
        place = self._places[max(earlier)] if earlier else Place()
        while place.step < step:
            place = self._after(place, self._counts(place, count), count)
        return place

    def _remember(self, place: Place) -> None:
        self._places[place.step] = place
        for later in [step for step in self._places if step > place.step]:
            del self._places[later]  # they may have followed from other batches
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)

    def _open(self, place: Place, more: Mapping[str, int]) -> dict[str, Fraction]:
        """Sources that have rows left, with their shares."""
        ratios = {name: ratio for name, ratio in self.shares(place.step).items() if ratio > 0}
        there = {name: ratio for name, ratio in ratios.items() if self._left(name, place, more) > 0}
        gone = [name for name in ratios if name not in there]
        if gone and (self.refuse or not there):
            raise ConfigError(
                f"data.sources.{gone[0]}: its rows are used up at step {place.step} "
                f"({self.passes[gone[0]]} passes over {self.pools[gone[0]].size}). Raise passes, or train for less"
                + (", or write data.missing=renormalise." if self.refuse else ".")
            )
        return exact(there)

    def _left(self, name: str, place: Place, more: Mapping[str, int]) -> float:
        size, passes = self.pools[name].size, self.passes.get(name, 0)
        return (
            float("inf") if not passes or size is None else size * passes - place.drawn.get(name, 0) - more.get(name, 0)
        )

    def _counts(self, place: Place, size: int) -> dict[str, int]:
        """Tasks of each source in the batch at `place`; always `size` of them in all."""
        counts: dict[str, int] = {}
        while (rest := size - sum(counts.values())) > 0:
            ratios = self._open(place, counts)
            behind = place.behind if not counts and place.behind.keys() == ratios.keys() else {}
            for name, number in deal(ratios, rest, behind).items():
                counts[name] = counts.get(name, 0) + int(min(number, self._left(name, place, counts)))
        return counts

    def _after(self, place: Place, counts: Mapping[str, int], size: int) -> Place:
        drawn = {name: place.drawn.get(name, 0) + counts.get(name, 0) for name in self.pools}
        after = replace(place, step=place.step + 1, drawn=drawn)
        ratios = exact(
            {name: ratio for name, ratio in self.shares(place.step).items() if self._there(name, ratio, after)}
        )
        if counts.keys() - ratios.keys():  # a source has left: what it was owed is no one's
            return replace(after, behind={})
        before = place.behind if place.behind.keys() == ratios.keys() else {}
        behind = {name: before.get(name, ZERO) + ratio * size - counts.get(name, 0) for name, ratio in ratios.items()}
        return replace(after, behind=behind)

    def _there(self, name: str, ratio: float | Fraction, place: Place) -> bool:
        return ratio > 0 and self._left(name, place, {}) > 0

    def check(self, steps: int, count: int) -> None:
        """Find out before training whether rows will last; only limited passes can run out."""
        if any(self.passes.values()):
            self._reach(steps, count)

    # -------------------------------------------------------------------------------------------- reports

    def metrics(self, step: int, groups: Sequence[Group] = ()) -> Metrics:
        """Where the batch of a step came from, and how much of each source has been seen by then."""
        place = self._places.get(step + 1) or self._reach(step + 1, sum(self._last.values()))
        total, size = sum(place.drawn.values()), sum(self._last.values())
        metrics: Metrics = {}
        for name, pool in self.pools.items():
            seen = coverage(pool.size, place.drawn.get(name, 0))
            metrics |= {f"data/{name}/{key}": value for key, value in seen.items()}
            metrics[f"data/{name}/share"] = self._last[name] / max(size, 1)
            metrics[f"data/{name}/share_so_far"] = place.drawn.get(name, 0) / max(total, 1)
            metrics |= {f"data/{name}/{why}": float(number) for why, number in pool.counts.items()}
            mine = [episode for group in groups if group.task.source == name for episode in group.valid_episodes]
            if mine and not mine[0].given:
                metrics[f"data/{name}/reward"] = float(np.mean([episode.reward for episode in mine]))
            if (success := success_of(name, groups)) is not None:
                metrics[f"data/{name}/success"] = success
        return metrics


def success_of(source: str, groups: Sequence[Group]) -> float | None:
    """The share of a source's episodes that succeeded; None where nobody judged that."""
    mine = [episode for group in groups if group.task.source == source for episode in group.valid_episodes]
    if not any("success" in episode.metrics for episode in mine):
        return None
    return float(np.mean([episode.metrics.get("success", 0.0) for episode in mine]))


def coverage(size: int | None, drawn: int) -> Metrics:
    """How much of a source has been seen after so many draws: every pass shows each row once."""
    if size is None:
        return {"repeats": 0.0}
    return {
        "repeats": float(max(drawn - size, 0)),
        "coverage": min(drawn / size, 1.0) if size else 1.0,
        "unseen": float(max(size - drawn, 0)),
    }


def _named_apart(tasks: Sequence[Task]) -> list[Task]:
    """A batch longer than its source holds a task twice; each still has a name of its own."""
    if len({task.id for task in tasks}) == len(tasks):
        return list(tasks)
    seen: Counter[str] = Counter()
    out = []
    for task in tasks:
        seen[task.id] += 1
        out.append(task if seen[task.id] == 1 else replace(task, id=f"{task.id}#{seen[task.id]}"))
    return out
