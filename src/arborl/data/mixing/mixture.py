"""Batches from several sources in exact proportions, deterministic and resumable.

The state of a mixture is a few numbers per source (`MixturePosition`). It follows from the earlier steps if all batches
have one size; with the state of a checkpoint it is exact in any case.

A quota (ratio * batch size) is seldom an integer. Each source gets its quota rounded down, and the remaining rows are
allocated by the algorithm PD2 of proportionate scheduling (Baruah, Cohen, Plaxton and Varvel 1996; Anderson and
Srinivasan 2001): sources are tasks, batches are time slots, remaining rows are processors. Every source stays
within one row of its exact share after every batch.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain, zip_longest
from math import ceil, floor
from typing import Any

import numpy as np

from arborl.data.mixing.quarantine import NUM_CANDIDATES, TaskQuarantine
from arborl.data.mixing.task_pools import TaskPool
from arborl.data.task_source import TaskSource
from arborl.errors import ConfigError
from arborl.seeds import generator
from arborl.types import Episode, Group, Metrics, Task

ZERO = Fraction(0)
NONE: Mapping[str, int] = {}


def normalize_ratios(ratios: Mapping[str, float | Fraction]) -> dict[str, Fraction]:
    written = {name: Fraction(str(ratio)) for name, ratio in ratios.items()}
    total = sum(written.values(), ZERO)
    return {name: ratio / total for name, ratio in written.items()}


def allocate(ratios: Mapping[str, Fraction], size: int, behind: Mapping[str, Fraction]) -> dict[str, int]:
    """Rows of each source in the next batch."""
    quotas = {name: ratio * size for name, ratio in ratios.items()}
    counts = {name: floor(quota) for name, quota in quotas.items()}
    spare = size - sum(counts.values())
    claims = {name: quotas[name] - counts[name] for name in ratios if quotas[name] > counts[name]}
    order = sorted(claims, key=lambda name: _urgency(claims[name], behind.get(name, ZERO)))
    for name in order[:spare]:
        counts[name] += 1
    return counts


def _urgency(claim: Fraction, behind: Fraction) -> tuple[bool, int, bool, int]:
    """Sort key, smallest first. `claim` is the fractional part of the quota, between 0 and 1."""
    early = behind + claim <= 0  # a row now would exceed its share
    deadline = (1 - behind) / claim
    due = ceil(deadline)
    presses = due != deadline  # the next row may fall into the deadline of this one
    group_deadline = 0  # batches until a source with a claim above 1/2 can skip a row again
    if presses and 2 * claim >= 1:
        rest = 1 - claim
        group_deadline = ceil((ceil(rest * due - behind) + behind) / rest)
    return early, due, not presses, -group_deadline


# ------------------------------------------------------------------------------------------------ mixture

log = logging.getLogger(__name__)

REMEMBERED = 64
"""Steps whose positions are kept, for repeated requests and late checkpoints."""


@dataclass(frozen=True, slots=True)
class SuccessBand:
    """The ratio of a source with a success rate outside `low` to `high` is multiplied by `outside`."""

    low: float = 0.0
    high: float = 1.0
    outside: float = 0.25
    decay: float = 0.9
    """Decay of the moving average of the success rate."""

    @property
    def active(self) -> bool:
        return self.low > 0 or self.high < 1


@dataclass(frozen=True, slots=True)
class MixturePosition:
    """State of a mixture before a step."""

    step: int = 0
    drawn: Mapping[str, int] = field(default_factory=dict)
    """Tasks taken of each source."""
    behind: Mapping[str, Fraction] = field(default_factory=dict)
    """Rows that each source is below its share, since the set of sources last changed."""


class Mixture(TaskSource):
    """Takes every batch from several pools."""

    def __init__(
        self,
        pools: Sequence[TaskPool],
        ratios: Mapping[str, float | Fraction],
        seed: int,
        passes: Mapping[str, int] | None = None,
        schedule: Sequence[tuple[int, Mapping[str, float]]] = (),
        band: SuccessBand | None = None,
        refuse: bool = True,
        quarantine: int = 0,
    ):
        self.pools = {pool.name: pool for pool in pools}
        self.ratios: dict[str, float | Fraction] = dict(ratios)
        self.seed, self.passes, self.schedule = seed, dict(passes or {}), list(schedule)
        self.band, self.refuse = band or SuccessBand(), refuse
        self.success: dict[str, float] = {}
        self._positions: OrderedDict[int, MixturePosition] = OrderedDict([(0, MixturePosition())])
        self._last: Counter[str] = Counter()
        self.quarantine = TaskQuarantine(quarantine)
        self._replaced: Counter[str] = Counter()
        """Replaced tasks of the last batch, by source."""

    def take(self, step: int, count: int) -> list[Task]:
        position = self._position_at(step, count)
        counts = self._counts(position, count)
        self._remember(self._after(position, counts, count))
        self._last = Counter(counts)
        tasks = [
            task
            for name, number in counts.items()
            for task in self._draw(name, position.drawn.get(name, 0), number, step)
        ]
        if len(self.pools) > 1:  # a part of a batch should contain all sources
            order = generator(self.seed, "batch", step).permutation(len(tasks))
            tasks = [tasks[int(index)] for index in order]
        return _with_unique_ids(tasks)

    def _draw(self, name: str, start: int, count: int, step: int) -> list[Task]:
        pool = self.pools[name]
        drawn = pool.take(start, count)
        tasks, self._replaced[name] = self.quarantine.replace(
            drawn, step, lambda: pool.take(start + count, NUM_CANDIDATES)
        )
        return tasks

    def evaluation(self, count: int) -> list[Task]:
        """Equal numbers of each source; other sources replace missing tasks."""
        candidates = [self.pools[name].evaluation(count) for name in self._used()]
        turns = chain.from_iterable(zip_longest(*candidates))
        chosen = [task for task in turns if task is not None][:count]
        return sorted(chosen, key=lambda task: list(self.pools).index(task.source))

    def steps(self, passes: int, count: int) -> int:
        """A pass is the total number of rows of the used sources."""
        rows = 0
        for name in self._used():
            size = self.pools[name].size
            if size is None:
                raise ConfigError(f"trainer.epochs={passes}: the source {name} is endless. Write trainer.steps.")
            rows += size
        return max(1, -(-passes * rows // count))

    def _used(self) -> list[str]:
        stages = [self.ratios, *(changed for _, changed in self.schedule)]
        return [name for name in self.pools if any(ratios.get(name, 0) for ratios in stages)]

    def observe(self, step: int, groups: Sequence[Group]) -> Metrics:
        for name in self.pools:
            now = success_of(name, groups)
            if now is not None:
                before = self.success.get(name, now)
                self.success[name] = self.band.decay * before + (1 - self.band.decay) * now
        return self.metrics(step, groups)

    def observe_episodes(self, step: int, episodes: Iterable[Episode]) -> None:
        pools = self.pools
        self.quarantine.observe(
            step, episodes, lambda task: task.source in pools and pools[task.source].size is not None
        )

    def set_aside(self) -> list[dict[str, Any]]:
        return self.quarantine.summary()

    def state(self, step: int) -> dict[str, Any]:
        position = self._positions.get(step) or self._position_at(step, sum(self._last.values()))
        behind = {name: str(value) for name, value in position.behind.items()}
        return {
            "step": position.step, "drawn": dict(position.drawn), "behind": behind, "success": dict(self.success),
            "quarantine": self.quarantine.state(),
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        if not state:
            return
        unknown = [name for name in state["drawn"] if name not in self.pools]
        if unknown:
            raise ConfigError(
                f"data.sources: the checkpoint has a source {unknown[0]!r}, which the configuration lacks. "
                f"Write data.sources.{unknown[0]}.ratio=0 to continue without it."
            )
        behind = {name: Fraction(value) for name, value in state["behind"].items()}
        self.success = dict(state["success"])
        self.quarantine.load_state(state.get("quarantine", {}))
        self._remember(MixturePosition(state["step"], dict(state["drawn"]), behind))

    def start_at(self, step: int) -> None:
        self._positions = OrderedDict([(step, MixturePosition(step))])

    def shares(self, step: int) -> dict[str, float | Fraction]:
        """The ratios at a step, before any source is exhausted."""
        ratios = dict(self.ratios)
        for begin, changed in self.schedule:
            if begin <= step:
                ratios |= changed
        if self.band.active:
            for name, success in self.success.items():
                if not self.band.low <= success <= self.band.high:
                    ratios[name] = Fraction(str(ratios[name])) * Fraction(str(self.band.outside))
        return ratios

    def _position_at(self, step: int, count: int) -> MixturePosition:
        """The position before a step: stored, or computed from an earlier one with batches of this size."""
        earlier = [at for at in self._positions if at <= step]
        position = self._positions[max(earlier)] if earlier else MixturePosition()
        while position.step < step:
            position = self._after(position, self._counts(position, count), count)
        return position

    def _remember(self, position: MixturePosition) -> None:
        self._positions[position.step] = position
        for later in [step for step in self._positions if step > position.step]:
            del self._positions[later]  # they may depend on other batches
        while len(self._positions) > REMEMBERED:
            self._positions.popitem(last=False)

    def _open(self, position: MixturePosition, more: Mapping[str, int]) -> dict[str, Fraction]:
        ratios = {name: ratio for name, ratio in self.shares(position.step).items() if ratio > 0}
        there = {name: ratio for name, ratio in ratios.items() if self._left(name, position, more) > 0}
        exhausted = [name for name in ratios if name not in there]
        if exhausted and (self.refuse or not there):
            name = exhausted[0]
            raise ConfigError(
                f"data.sources.{name}: its rows are exhausted at step {position.step} "
                f"({self.passes[name]} passes over {self.pools[name].size}). Raise passes, or train for fewer steps"
                + (", or write data.missing=renormalise." if self.refuse else ".")
            )
        return normalize_ratios(there)

    def _left(self, name: str, position: MixturePosition, more: Mapping[str, int] = NONE) -> float:
        size, passes = self.pools[name].size, self.passes.get(name, 0)
        if not passes or size is None:
            return float("inf")
        return size * passes - position.drawn.get(name, 0) - more.get(name, 0)

    def _counts(self, position: MixturePosition, size: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        while (rest := size - sum(counts.values())) > 0:
            ratios = self._open(position, counts)
            behind = position.behind if not counts and position.behind.keys() == ratios.keys() else {}
            for name, number in allocate(ratios, rest, behind).items():
                counts[name] = counts.get(name, 0) + int(min(number, self._left(name, position, counts)))
        return counts

    def _after(self, position: MixturePosition, counts: Mapping[str, int], size: int) -> MixturePosition:
        drawn = {name: position.drawn.get(name, 0) + counts.get(name, 0) for name in self.pools}
        after = replace(position, step=position.step + 1, drawn=drawn)
        shares = self.shares(position.step).items()
        ratios = normalize_ratios({name: ratio for name, ratio in shares if ratio > 0 and self._left(name, after) > 0})
        if counts.keys() - ratios.keys():  # a source is exhausted: its remainder is dropped
            return replace(after, behind={})
        before = position.behind if position.behind.keys() == ratios.keys() else {}
        behind = {name: before.get(name, ZERO) + ratio * size - counts.get(name, 0) for name, ratio in ratios.items()}
        return replace(after, behind=behind)

    def check(self, steps: int, count: int) -> None:
        """ConfigError if limited passes will not last for the run."""
        if any(self.passes.values()):
            self._position_at(steps, count)

    def metrics(self, step: int, groups: Sequence[Group] = ()) -> Metrics:
        position = self._positions.get(step + 1) or self._position_at(step + 1, sum(self._last.values()))
        total, size = sum(position.drawn.values()), sum(self._last.values())
        metrics: Metrics = {}
        for name, pool in self.pools.items():
            seen_ids = coverage(pool.size, position.drawn.get(name, 0))
            metrics |= {f"data/{name}/{key}": value for key, value in seen_ids.items()}
            metrics[f"data/{name}/share"] = self._last[name] / max(size, 1)
            metrics[f"data/{name}/share_so_far"] = position.drawn.get(name, 0) / max(total, 1)
            if self.quarantine.after:
                metrics[f"data/{name}/set_aside"] = float(self._replaced[name])
            metrics |= {f"data/{name}/{why}": float(number) for why, number in pool.counts.items()}
            episodes = [episode for group in groups if group.task.source == name for episode in group.valid_episodes]
            if episodes and not episodes[0].is_offline:
                metrics[f"data/{name}/reward"] = float(np.mean([episode.reward for episode in episodes]))
            if (success := success_of(name, groups)) is not None:
                metrics[f"data/{name}/success"] = success
        return metrics


def success_of(source: str, groups: Sequence[Group]) -> float | None:
    """The success rate of a source; None if no episode reports success."""
    episodes = [episode for group in groups if group.task.source == source for episode in group.valid_episodes]
    if not any("success" in episode.metrics for episode in episodes):
        return None
    return float(np.mean([episode.metrics.get("success", 0.0) for episode in episodes]))


def coverage(size: int | None, drawn: int) -> Metrics:
    """Coverage of a source after `drawn` tasks; every pass contains each row once."""
    if size is None:
        return {"repeats": 0.0}
    return {
        "repeats": float(max(drawn - size, 0)),
        "coverage": min(drawn / size, 1.0) if size else 1.0,
        "unseen": float(max(size - drawn, 0)),
    }


def _with_unique_ids(tasks: Sequence[Task]) -> list[Task]:
    """Unique ids: a batch that is larger than its source contains a task twice."""
    seen_ids: Counter[str] = Counter()
    out = []
    for task in tasks:
        seen_ids[task.id] += 1
        out.append(task if seen_ids[task.id] == 1 else replace(task, id=f"{task.id}#{seen_ids[task.id]}"))
    return out


def composition(mixture: Mixture, batches: int, size: int) -> dict[str, Any]:
    """The composition of batches, counted from the drawn tasks (`arborl data mix`)."""
    drawn: Counter[str] = Counter()
    seen_ids: dict[str, set[str]] = {name: set() for name in mixture.pools}
    wanted = dict.fromkeys(mixture.pools, 0.0)
    short, worst = 0, 0.0
    for step in range(batches):
        tasks = mixture.take(step, size)
        counts = Counter(task.source for task in tasks)
        drawn += counts
        short += len(tasks) < size
        shares = normalize_ratios({name: ratio for name, ratio in mixture.shares(step).items() if ratio > 0})
        for name in mixture.pools:
            quota = float(shares.get(name, 0)) * size
            wanted[name] += quota
            worst = max(worst, abs(counts[name] - quota))
        for task in tasks:
            seen_ids[task.source].add(task.id.partition("#")[0])
    total = batches * size
    sources = {}
    for name, pool in mixture.pools.items():
        seen_rows = coverage(pool.size, drawn[name])
        sources[name] = {
            "target": round(wanted[name] / total, 6),
            "achieved": round(drawn[name] / total, 6),
            "rows": pool.size,
            "drawn": drawn[name],
            "distinct": len(seen_ids[name]),
            "repeats": int(seen_rows["repeats"]),
            "coverage": round(seen_rows["coverage"], 6) if "coverage" in seen_rows else None,
            "never_seen": int(seen_rows.get("unseen", 0)),
            **{f"rows_{why}": count for why, count in pool.counts.items()},
        }
    error = max(abs(drawn[name] - wanted[name]) for name in mixture.pools)
    return {
        "sources": sources,
        "batches": batches,
        "batch_size": size,
        "short_batches": short,
        "largest_batch_error": round(worst, 6),
        "largest_total_error": round(error, 6),
    }
