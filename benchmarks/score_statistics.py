"""Statistics of the scores of several runs on several environments, as in rliable (Agarwal et al. 2021, arXiv
2108.13264): interquartile mean, probability of improvement, stratified bootstrap intervals.

The scores of one algorithm are a mapping from the environment to the scores of its runs, one per seed. Environments may
have different numbers of runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Scores = Mapping[str, Sequence[float]]
"""Scores by environment."""
REPETITIONS = 50_000
"""Bootstrap samples; the default of rliable."""
CHUNK = 5_000
"""Bootstrap samples that are in memory at once."""
CUT = 0.25
"""Share of the scores that the interquartile mean leaves out at each end."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; NaN if an environment has one run, which has no spread."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


def interquartile_mean(scores: ArrayLike) -> Array:
    """Mean of the middle half along the last axis. Of n scores, floor(n / 4) are left out at each end, as in
    `scipy.stats.trim_mean(scores, 0.25)`."""
    ordered = np.sort(np.asarray(scores, dtype=np.float64), axis=-1)
    count = ordered.shape[-1]
    if count == 0:
        raise ValueError("no scores")
    left_out = int(CUT * count)
    return np.asarray(ordered[..., left_out : count - left_out].mean(axis=-1))


def pooled_iqm(scores: Scores) -> float:
    """Interquartile mean over the runs of all environments."""
    return float(interquartile_mean(np.concatenate([np.asarray(runs, dtype=np.float64) for runs in scores.values()])))


def iqm_estimate(scores: Scores, seed: int = 0, repetitions: int = REPETITIONS) -> Estimate:
    """Interquartile mean over the runs of all environments. The interval is the percentile interval of the stratified
    bootstrap: runs are resampled within each environment, and the environments stay."""
    if _has_single_run(scores):
        return Estimate(pooled_iqm(scores), nan, nan)
    rng = np.random.default_rng(seed)
    samples = [
        interquartile_mean(np.concatenate([_resampled(runs, count, rng) for runs in scores.values()], axis=1))
        for count in _chunks(repetitions)
    ]
    return _with_interval(pooled_iqm(scores), np.concatenate(samples))


def improvement(first: ArrayLike, second: ArrayLike) -> Array:
    """P(x > y) for a random score x of `first` and y of `second`, along the last axes; ties count 1/2. This is the
    Mann-Whitney U statistic divided by the number of pairs."""
    x, y = np.asarray(first, dtype=np.float64)[..., :, None], np.asarray(second, dtype=np.float64)[..., None, :]
    return np.asarray(((x > y) + 0.5 * (x == y)).mean(axis=(-2, -1)))


def improvement_estimate(first: Scores, second: Scores, seed: int = 0, repetitions: int = REPETITIONS) -> Estimate:
    """Probability that a run of the first algorithm has a higher score than a run of the second, averaged over the
    environments with equal weight. The runs of both are resampled independently within each environment."""
    if first.keys() != second.keys():
        raise ValueError(f"different environments: {', '.join(first)}; {', '.join(second)}")
    value = float(np.mean([improvement(first[name], second[name]) for name in first]))
    if _has_single_run(first) or _has_single_run(second):
        return Estimate(value, nan, nan)
    rng = np.random.default_rng(seed)
    samples = [
        np.mean(
            [improvement(_resampled(first[name], n, rng), _resampled(second[name], n, rng)) for name in first], axis=0
        )
        for n in _chunks(repetitions)
    ]
    return _with_interval(value, np.concatenate(samples))


def _has_single_run(scores: Scores) -> bool:
    return any(len(runs) == 1 for runs in scores.values())


def _chunks(repetitions: int) -> list[int]:
    return [min(CHUNK, repetitions - begin) for begin in range(0, repetitions, CHUNK)]


def _resampled(scores: Sequence[float], repetitions: int, rng: np.random.Generator) -> Array:
    """Bootstrap samples, [repetitions, runs]."""
    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        raise ValueError("an environment has no scores")
    return values[rng.integers(0, len(values), (repetitions, len(values)))]


def _with_interval(value: float, samples: Array) -> Estimate:
    low, high = np.percentile(samples, (2.5, 97.5))
    return Estimate(value, float(low), float(high))
