"""Comparison of policies on the same held-out tasks: pass@k, bootstrap intervals, paired tests.

Tasks are the samples: several episodes of one task are averaged first. A failed episode counts as 0. Intervals are
95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb
from statistics import fmean

import numpy as np

from arborl.trainer.evaluation import count_episodes, counts_for, episode_metric, episode_scores, group_mean, wilson
from arborl.types import Group, Metrics

NUM_RESAMPLES = 2000
NUM_SIGN_FLIPS = 10_000
"""Of a paired test with more than `MAX_EXACT` differing tasks."""
MAX_EXACT = 12
"""Differing tasks up to which a paired test enumerates all sign flips."""
TaskScore = Callable[[Group], float]


@dataclass(frozen=True, slots=True)
class Score:
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    name: str
    decoding: str
    """`sampled`, `greedy`, or a temperature: `t=0.7`."""
    metrics: Metrics
    groups: Sequence[Group] = ()
    """The episodes by task; empty for demonstrations."""
    judged: bool = True
    """Whether a reward or the environment scores the episodes."""

    @property
    def sources(self) -> list[str]:
        sources = list(dict.fromkeys(group.task.source for group in self.groups))
        return sources if len(sources) > 1 else []

    def scores(self, source: str | None = None) -> dict[str, Score]:
        """Success, reward, rewards of weight 0, pass@k and pass^k, of all tasks or of one source."""
        if not self.judged:
            return {}
        if not self.groups:
            return {name: Score(value) for name, value in self.metrics.items() if name not in ("tasks", "failed")}
        groups = [group for group in self.groups if group.episodes and source in (None, group.task.source)]
        return {
            name: _score(name, [score(group) for group in groups if counts_for(name, group)])
            for name, score in task_scores(groups).items()
        }

    def count(self, source: str | None = None) -> tuple[int, int, int]:
        groups = [group for group in self.groups if source in (None, group.task.source)]
        tasks = len(groups) if self.groups else int(self.metrics.get("tasks", 0))
        return tasks, *count_episodes(groups)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    first: str
    second: str
    decoding: str
    metric: str
    tasks: int
    difference: float
    """Of the first minus the second."""
    low: float | None
    high: float | None
    p: float
    """Probability of a difference this large if the signs of the tasks' differences were random."""


def task_scores(groups: Sequence[Group]) -> dict[str, TaskScore]:
    survivors = [episode for group in groups for episode in group.valid_episodes]
    if not survivors:
        return {}
    scores: dict[str, TaskScore] = {
        name: partial(group_mean, value) for name, value in episode_scores(survivors).items()
    }
    for k in attempt_counts(min(len(group.episodes) for group in groups)) if "success" in scores else ():
        scores[f"pass@{k}"], scores[f"pass^{k}"] = partial(_pass, k, pass_at_k), partial(_pass, k, pass_all_k)
    return scores


def attempt_counts(least: int) -> list[int]:
    """The k of pass@k: powers of two, and the number of attempts. One attempt is success itself.

    >>> attempt_counts(6), attempt_counts(1)
    ([2, 4, 6], [])
    """
    powers = [2**n for n in range(1, least.bit_length()) if 2**n <= least]
    return [*powers, *([least] if least > 1 and least not in powers else [])]


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that at least one of k attempts is right, drawn from n with `right` right ones (unbiased).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


def pass_all_k(n: int, right: int, k: int) -> float:
    """Probability that all k attempts are right: pass^k (unbiased).

    >>> pass_all_k(4, 2, 2) == 1 / 6
    True
    """
    return comb(right, k) / comb(n, k)


def _pass(k: int, probability: Callable[[int, int, int], float], group: Group) -> float:
    right = sum(episode_metric("success", episode) >= 1.0 for episode in group.valid_episodes)
    return probability(len(group.episodes), right, k)


def _score(name: str, values: Sequence[float]) -> Score:
    interval = bootstrap(values)
    is_share = name == "success" or name.startswith("pass")
    if interval is None and is_share and 0 <= values[0] <= 1:  # all equal: a bootstrap has no width, Wilson has
        interval = wilson(values[0], len(values))
    return Score(fmean(values), *(interval or (None, None)))


def bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """Bootstrap interval of a mean, with a fixed seed; None if all values are equal.

    >>> bootstrap([1.0, 1.0]) is None
    True
    """
    array = np.asarray(values, float)
    if len(array) < 2 or np.all(array == array[0]):
        return None
    generator = np.random.default_rng(len(array))
    means = [array[generator.integers(0, len(array), len(array))].mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def compare_policies(results: Sequence[PolicyResult]) -> list[PairedComparison]:
    """Every two policies with the same decoding, by success on common tasks, or by reward without success."""
    pairs = (compare_pair(one, other) for one, other in combinations(results, 2) if one.decoding == other.decoding)
    return [pair for pair in pairs if pair is not None]


def compare_pair(one: PolicyResult, other: PolicyResult) -> PairedComparison | None:
    """None without common tasks or scores."""
    sides = [{group.task.id: group for group in side.groups if group.episodes} for side in (one, other)]
    common = [task for task in sides[0] if task in sides[1]]
    if not (common and one.judged and other.judged):
        return None
    scores = [task_scores([side[task] for task in common]) for side in sides]
    metric = next((name for name in ("success", "reward") if all(name in names for names in scores)), None)
    if metric is None:
        return None
    common = [task for task in common if all(counts_for(metric, side[task]) for side in sides)]
    first, second = ([names[metric](side[task]) for task in common] for names, side in zip(scores, sides, strict=True))
    differences = np.subtract(first, second)
    low, high = bootstrap(differences.tolist()) or (None, None)
    mean, p = float(differences.mean()), sign_flip_test(differences.tolist())
    return PairedComparison(one.name, other.name, one.decoding, metric, len(common), mean, low, high, p)


def sign_flip_test(differences: Sequence[float]) -> float:
    """p of a paired permutation test: exact for few differing tasks, else of `NUM_SIGN_FLIPS` random flips.

    >>> sign_flip_test([1.0, 1.0, 1.0, 0.0])
    0.25
    """
    array = np.asarray([one for one in differences if one], float)
    if not len(array):
        return 1.0
    if len(array) <= MAX_EXACT:
        signs = 1 - 2 * ((np.arange(2 ** len(array))[:, None] >> np.arange(len(array))) & 1)
        observed = 0
    else:
        signs = np.random.default_rng(len(array)).choice([-1, 1], (NUM_SIGN_FLIPS, len(array)))
        observed = 1  # the observed signs are one of the flips
    reached = np.abs(signs @ array) >= abs(array.sum()) - 1e-9
    return float((reached.sum() + observed) / (len(signs) + observed))
