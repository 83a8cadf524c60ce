"""The closed form of a step against cases that are computed by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from arborl.cluster.planner.step_time import StepTimeInputs, estimate_step, expected_completion
from arborl.cluster.planner.workload import TurnProfile, Workload


def estimate(draw=lambda rng: (TurnProfile(10, 100, 0.0),), **more):
    values = {
        "episodes": Workload(draw, "", {}).sample(), "groups": 4, "group_size": 2, "engines": 1, "max_requests": 8,
        "kv_tokens": 1e9, "sampling_step": lambda rows, context: 0.01, "prefill": lambda tokens: 0.0,
        "learn": lambda tokens, terms: 0.5, "publish": 0.25,
    }  # fmt: skip
    return estimate_step(StepTimeInputs(**values | more))


def test_expected_maxima_of_uniform_times():
    times = np.arange(1_001) / 1_000
    assert expected_completion(times, 1) == pytest.approx(0.5)
    assert expected_completion(times, 3) == pytest.approx(0.75, abs=0.001)
    assert expected_completion(times, 1, size=3) == pytest.approx(0.75, abs=0.001)
    assert expected_completion(times, 1, size=1, redundancy=1) == pytest.approx(1 / 3, abs=0.001)
    assert expected_completion(times, 10**9) == pytest.approx(1.0)


def test_a_synchronous_step_is_the_sum_of_sampling_learning_and_weight_transfer():
    found = estimate()
    assert found.step == pytest.approx(1.0 + 0.5 + 0.25)
    assert (found.lag, found.lag_max) == (0, 0)
    assert found.sampled == pytest.approx(8 * 100 / 1.75)


def test_requests_beyond_the_limits_wait():
    assert estimate(max_requests=4).wait == pytest.approx(2.0)
    assert estimate(max_requests=4, engines=2).wait == pytest.approx(1.0)
    assert estimate(concurrency=2).wait == pytest.approx(4.0)


def test_turns_tools_and_prefill_add_up():
    def draw(rng):
        return (TurnProfile(10, 100, 2.0), TurnProfile(5, 50, 1.0))

    assert estimate(draw).wait == pytest.approx(1.0 + 2.0 + 0.5 + 1.0)
    slow = estimate(draw, prefill=lambda tokens: tokens / 100)
    assert slow.wait == pytest.approx(4.5 + 4 * 0.1 + 8 * 0.05)  # a group reads its prompt once


def test_a_decode_step_grows_with_rows_and_context():
    assert estimate(sampling_step=lambda rows, context: 0.001 * rows).wait == pytest.approx(0.8)
    by_context = estimate(sampling_step=lambda rows, context: 1e-5 * context)
    assert by_context.wait == pytest.approx(1e-5 * 100 * (4 * 10 + 8 * 50), rel=0.01)


def test_with_lag_the_longer_of_sampling_and_learning_counts():
    values = {"max_lag": 1, "learn": lambda tokens, terms: 3.0, "publish": 0.0}
    found = estimate(**values)
    assert found.step == pytest.approx(3.0)
    assert found.learner_busy == pytest.approx(1.0)
    assert estimate(**values, shared=True).step == pytest.approx(4.0)  # one device alternates


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_lag_shortens_the_step_of_a_run_with_slow_tools_and_is_bounded(lag):
    def draw(rng: random.Random):
        return (TurnProfile(10, 20, rng.choice([0.0, 0.0, 0.0, 20.0])),)

    found = estimate(draw, max_lag=lag, groups=8)
    assert 0 < found.lag <= found.lag_max <= lag
    assert found.step < estimate(draw, groups=8).step


def test_redundant_episodes_shorten_the_step():
    def draw(rng: random.Random):
        return (TurnProfile(10, 100, 50.0 if rng.random() < 0.05 else 0.0),)

    assert estimate(draw, redundancy=2).step < estimate(draw).step
