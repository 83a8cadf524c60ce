"""Policies side by side: what each scored on the same held-out tasks, how sure that is, and whether one is better.

Tasks are what was drawn: several attempts at one task are averaged first and count as one. A failed episode counts as 0
of everything. Intervals are 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb
from statistics import fmean

import numpy as np

from arborl.trainer.evaluate import counted, is_beside
from arborl.trainer.intervals import wilson
from arborl.types import Episode, Group, Metrics

RESAMPLES = 2000
"""Of a bootstrap."""
FLIPS = 10_000
"""Of a paired test, where trying all of them would take more."""
EXACT = 12
"""Tasks that differ, up to which all ways of flipping signs are tried."""


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over tasks, and between what it lies; no ends where so few tasks say nothing about it."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """What one policy did in one way of playing."""

    name: str
    """Of the policy: the path or the name that was asked for."""
    way: str
    """`sampled`, `greedy`, or a temperature: `t=0.7`."""
    metrics: Metrics
    """The plain numbers, as a run's evaluations have them."""
    groups: Sequence[Group] = ()
    """The episodes by task; none where nothing was played (rows that say themselves what was said)."""
    judged: bool = True
    """Whether anything says how good an episode was."""

    @property
    def sources(self) -> list[str]:
        """Where the tasks came from, where from several places."""
        found = list(dict.fromkeys(group.task.source for group in self.groups))
        return found if len(found) > 1 else []

    def scores(self, source: str | None = None) -> dict[str, Score]:
        """By metric, of all tasks or of one source: success, reward, rewards that are only shown, pass@k and pass^k."""
        if not self.judged:
            return {}
        if not self.groups:
            return {name: Score(value) for name, value in self.metrics.items() if name not in ("tasks", "failed")}
        groups = [group for group in self.groups if group.episodes and source in (None, group.task.source)]
        return {name: _score(name, by_task(groups, value)) for name, value in measures(groups).items()}

    def count(self, source: str | None = None) -> tuple[int, int, int]:
        """Tasks, episodes, and how many of these failed."""
        groups = [group for group in self.groups if source in (None, group.task.source)]
        tasks = len(groups) if self.groups else int(self.metrics.get("tasks", 0))
        return tasks, *counted(groups)


@dataclass(frozen=True, slots=True)
class Paired:
    """Two policies on the tasks that both played."""

    first: str
    second: str
    way: str
    metric: str
    tasks: int
    difference: float
    """The second's mean less the first's."""
    low: float | None
    high: float | None
    p: float
    """How often chance alone, turning the sign of each task's difference, gives a mean as far from 0."""


Measure = Callable[[Group], float]


def measures(groups: Sequence[Group]) -> dict[str, Measure]:
    """What can be said of every task of these, by name."""
    alive = [episode for group in groups for episode in group.valid_episodes]
    if not alive:
        return {}
    found: dict[str, Measure] = {}
    judged = any("success" in episode.metrics for episode in alive)
    if judged:
        found["success"] = partial(_mean, partial(_metric, "success"))
    found["reward"] = partial(_mean, _reward)
    for name in dict.fromkeys(name for episode in alive for name in episode.metrics if is_beside(name)):
        found[name] = partial(_mean, partial(_metric, name))
    for k in attempts(min(len(group.episodes) for group in groups)) if judged else ():
        found[f"pass@{k}"], found[f"pass^{k}"] = partial(_passed, k, any_of), partial(_passed, k, all_of)
    return found


def attempts(least: int) -> list[int]:
    """The k of pass@k: powers of two, and as many as there are; one attempt is success itself.

    >>> attempts(6), attempts(1)
    ([2, 4, 6], [])
    """
    powers = [2**n for n in range(1, least.bit_length()) if 2**n <= least]
    return [*powers, *([least] if least > 1 and least not in powers else [])]


def any_of(n: int, right: int, k: int) -> float:
    """Chance that one of k attempts, drawn from n of which so many are right, is right: pass@k, unbiased.

    >>> any_of(4, 1, 2)
    0.5
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


def all_of(n: int, right: int, k: int) -> float:
    """Chance that all of k attempts are right: pass^k, unbiased.

    >>> all_of(4, 2, 2) == 1 / 6
    True
    """
    return comb(right, k) / comb(n, k)


def _passed(k: int, chance: Callable[[int, int, int], float], group: Group) -> float:
    right = sum(_metric("success", episode) >= 1.0 for episode in group.valid_episodes)
    return chance(len(group.episodes), right, k)


def _mean(value: Callable[[Episode], float], group: Group) -> float:
    return fmean(value(episode) if episode.failure is None else 0.0 for episode in group.episodes)


def _metric(name: str, episode: Episode) -> float:
    return episode.metrics.get(name, 0.0)


def _reward(episode: Episode) -> float:
    return episode.reward


def by_task(groups: Sequence[Group], measure: Measure) -> list[float]:
    return [measure(group) for group in groups]


def _score(name: str, values: Sequence[float]) -> Score:
    ends = bootstrap(values)
    is_share = name == "success" or name.startswith("pass")
    if ends is None and is_share and 0 <= values[0] <= 1:  # all alike: drawing again says nothing, Wilson does
        ends = wilson(values[0], len(values))
    return Score(fmean(values), *(ends or (None, None)))


def bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """Of a mean: what the middle 95 % of means of tasks drawn again lie between. The same for the same numbers; None
    where all are equal.

    >>> bootstrap([1.0, 1.0]) is None
    True
    """
    given = np.asarray(values, float)
    if len(given) < 2 or np.all(given == given[0]):
        return None
    chance = np.random.default_rng(len(given))
    means = [given[chance.integers(0, len(given), len(given))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def compare(played: Sequence[Played]) -> list[Paired]:
    """Every two policies that played in the same way, by the success of tasks that both met; by reward where nobody
    judged success."""
    found = (paired(one, other) for one, other in combinations(played, 2) if one.way == other.way)
    return [pair for pair in found if pair is not None]


def paired(one: Played, other: Played) -> Paired | None:
    """One comparison; None where they have no task in common or nothing was judged."""
    sides = [{group.task.id: group for group in side.groups if group.episodes} for side in (one, other)]
    common = [task for task in sides[0] if task in sides[1]]
    if not (common and one.judged and other.judged):
        return None
    known = [measures([side[task] for task in common]) for side in sides]
    metric = next((name for name in ("success", "reward") if all(name in names for names in known)), None)
    if metric is None:
        return None
    first, second = ([names[metric](side[task]) for task in common] for names, side in zip(known, sides, strict=True))
    differences = np.subtract(second, first)
    low, high = bootstrap(differences.tolist()) or (None, None)
    mean = float(differences.mean())
    return Paired(one.name, other.name, one.way, metric, len(common), mean, low, high, by_chance(differences.tolist()))


def by_chance(differences: Sequence[float]) -> float:
    """p of a paired test by turning signs: exact where few tasks differ, else of `FLIPS` turns.

    >>> by_chance([1.0, 1.0, 1.0, 0.0])
    0.25
    """
    given = np.asarray([one for one in differences if one], float)
    if not len(given):
        return 1.0
    if len(given) <= EXACT:
        signs = 1 - 2 * ((np.arange(2 ** len(given))[:, None] >> np.arange(len(given))) & 1)
        more = 0
    else:
        signs = np.random.default_rng(len(given)).choice([-1, 1], (FLIPS, len(given)))
        more = 1  # what was seen is one of the ways
    reached = np.abs(signs @ given) >= abs(given.sum()) - 1e-9
    return float((reached.sum() + more) / (len(signs) + more))
