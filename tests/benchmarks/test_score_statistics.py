"""Statistics of scores: interquartile mean, probability of improvement, coverage of their bootstrap intervals."""

from __future__ import annotations

from itertools import product
from math import erf, isnan
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FIRST = {
    "a": [0.85, 0.83, 0.62, 0.87, 0.965],
    "b": [0.79, 0.95, 0.69, 0.815, 0.775],
    "c": [0.73, 0.715, 0.87, 0.695, 0.91],
}
SECOND = {
    "a": [0.91, 0.7, 0.785, 0.975, 0.715],
    "b": [0.63, 0.56, 0.76, 0.41, 0.91],
    "c": [0.96, 0.795, 0.795, 0.685, 0.71],
}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def trimmed_mean(values: list[float]) -> float:
    """Mean without the floor(n / 4) lowest and highest values, one at a time."""
    kept = list(values)
    for _ in range(len(values) // 4):
        kept.remove(min(kept))
        kept.remove(max(kept))
    return fmean(kept)


@pytest.mark.parametrize("count", range(1, 25))
def test_interquartile_mean_leaves_out_a_quarter_of_the_scores_at_each_end(count):
    from score_statistics import interquartile_mean

    values = np.round(np.random.default_rng(count).random(count), 1)  # with ties
    assert interquartile_mean(values) == pytest.approx(trimmed_mean(values.tolist()), abs=1e-12)


def test_interquartile_mean_ignores_outliers_and_takes_the_last_axis():
    from score_statistics import interquartile_mean

    assert interquartile_mean([[0.0, 1.0, 2.0, 1000.0], [5.0, 5.0, 5.0, -1000.0]]).tolist() == [1.5, 5.0]


def test_point_estimates_and_intervals_equal_those_of_rliable():
    """The expected values were computed with rliable 1.2.0 and scipy 1.17.1 (20,000 and 5,000 bootstrap samples)."""
    from score_statistics import improvement_estimate, iqm_estimate

    iqm, better = iqm_estimate(FIRST), improvement_estimate(FIRST, SECOND)
    assert iqm.value == pytest.approx(0.805, abs=1e-12)
    assert (iqm.low, iqm.high) == pytest.approx((0.74833, 0.86389), abs=2e-3)
    assert better.value == pytest.approx(0.6133333333333334, abs=1e-12)
    assert (better.low, better.high) == pytest.approx((0.4, 0.81333), abs=0.014)  # multiples of 1/150


def test_improvement_equals_the_share_of_all_pairs_with_ties_counted_half():
    from score_statistics import improvement, improvement_estimate

    rng = np.random.default_rng(3)
    for num_first, num_second in ((1, 1), (5, 5), (3, 7)):
        first, second = rng.integers(0, 4, num_first), rng.integers(0, 4, num_second)
        pairs = [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in product(first, second)]
        assert improvement(first, second) == pytest.approx(fmean(pairs), abs=1e-12)
        assert improvement(first, second) + improvement(second, first) == pytest.approx(1.0, abs=1e-12)
    equal = {"a": [0.5, 0.5], "b": [1.0, 1.0]}
    assert improvement_estimate(equal, equal).value == 0.5
    assert improvement_estimate({"a": [2, 3], "b": [0, 0]}, {"a": [0, 1], "b": [1, 1]}).value == 0.5  # equal weights


def test_environments_are_resampled_separately():
    """Between environments there is no variance in the interval, however different their scores are."""
    from score_statistics import improvement_estimate, iqm_estimate

    constant = {"easy": [1.0] * 4, "hard": [0.1] * 4}
    estimate = iqm_estimate(constant)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.55, 0.55, 0.55))
    worse = {"easy": [0.9] * 4, "hard": [0.0] * 4}
    better = improvement_estimate(constant, worse)
    assert (better.value, better.low, better.high) == (1.0, 1.0, 1.0)


def test_one_run_has_no_interval():
    from score_statistics import improvement_estimate, iqm_estimate

    for estimate in (
        iqm_estimate({"a": [0.5], "b": [0.1, 0.2]}),
        improvement_estimate({"a": [0.5]}, {"a": [0.1, 0.2]}),
    ):
        assert isnan(estimate.low)
        assert isnan(estimate.high)
        assert "[" not in str(estimate)


def test_missing_scores_and_different_environments_are_refused():
    from score_statistics import improvement_estimate, iqm_estimate

    with pytest.raises(ValueError, match="no scores"):
        iqm_estimate({"a": [0.1, 0.2], "b": []})
    with pytest.raises(ValueError, match="different environments"):
        improvement_estimate({"a": [0.1, 0.2]}, {"b": [0.1, 0.2]})


ENVIRONMENTS = {"lake": (0.92, 0.02), "sokoban": (0.82, 0.04), "calculator": (0.98, 0.012)}
"""Mean and standard deviation of simulated scores."""
SIMULATIONS = 300


@pytest.mark.parametrize(
    ("runs", "overall", "single", "better"),
    [(5, (0.75, 0.89), (0.85, 0.95), (0.88, 0.97)), (20, (0.88, 0.97), (0.90, 0.98), (0.91, 0.99))],
)
def test_coverage_of_the_95_percent_intervals(runs, overall, single, better):
    """With five runs the intervals cover less than 95 %: a bootstrap sample of few runs varies too little."""
    from score_statistics import improvement_estimate, interquartile_mean, iqm_estimate

    rng = np.random.default_rng(1)
    gain, population = 0.01, np.concatenate([rng.normal(*e, 100_000) for e in ENVIRONMENTS.values()])
    true_iqm = float(interquartile_mean(population))
    true_better = fmean((1 + erf(gain / (2 * std))) / 2 for _, std in ENVIRONMENTS.values())  # both have this deviation
    covered = np.zeros(3)
    for seed in range(SIMULATIONS):
        first = {name: rng.normal(mean, std, runs) for name, (mean, std) in ENVIRONMENTS.items()}
        second = {name: rng.normal(mean + gain, std, runs) for name, (mean, std) in ENVIRONMENTS.items()}
        estimates = (
            iqm_estimate(first, seed, 500), iqm_estimate({"lake": first["lake"]}, seed, 500),
            improvement_estimate(second, first, seed, 500),
        )  # fmt: skip
        truths = (true_iqm, ENVIRONMENTS["lake"][0], true_better)
        covered += [e.low <= truth <= e.high for e, truth in zip(estimates, truths, strict=True)]
    for share, (low, high) in zip(covered / SIMULATIONS, (overall, single, better), strict=True):
        assert low <= share <= high
