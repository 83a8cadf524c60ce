"""The simulation beside what can be worked out by hand."""

from __future__ import annotations

import random

import pytest

from arborl.cluster.plan_work import Turn
from arborl.cluster.simulate import simulate
from arborl.cluster.simulate_engine import Setting


def setting(**more) -> Setting:
    usual = {
        "draw": lambda chance: (Turn(10, 100, 0.0),), "groups": 4, "members": 2, "engines": 1, "slots": 8, "room": 1e9,
        "sampling_step": lambda rows, context: 0.01, "reading": lambda tokens: 0.0,
        "learn": lambda tokens, terms: 0.5, "publish": 0.25,
    }  # fmt: skip
    return Setting(**usual | more)


def test_a_synchronous_step_is_sampling_learning_and_new_weights_one_after_the_other():
    found = simulate(setting())
    assert found.step == pytest.approx(1.0 + 0.5 + 0.25)
    assert (found.lag, found.lag_max, found.again) == (0, 0, 0)
    assert found.sampled == pytest.approx(8 * 100 / 1.75)


def test_requests_beyond_the_slots_wait_their_turn():
    assert simulate(setting(slots=4)).wait == pytest.approx(2.0)
    assert simulate(setting(slots=4, engines=2)).wait == pytest.approx(1.0)


def test_turns_tools_and_reading_add_up():
    script = (Turn(10, 100, 2.0), Turn(5, 50, 1.0))
    assert simulate(setting(draw=lambda chance: script)).wait == pytest.approx(1.0 + 2.0 + 0.5 + 1.0)
    slow = simulate(setting(draw=lambda chance: script, reading=lambda tokens: tokens / 100))
    assert slow.wait == pytest.approx(4.5 + 4 * 0.1 + 8 * 0.05)  # siblings share the prompt's reading


def test_a_step_grows_with_rows_and_with_what_they_look_at():
    by_rows = simulate(setting(sampling_step=lambda rows, context: 0.001 * rows))
    assert by_rows.wait == pytest.approx(0.8)
    seen = simulate(setting(sampling_step=lambda rows, context: 1e-5 * context))
    assert seen.wait == pytest.approx(1e-5 * 100 * (4 * 10 + 8 * 50), rel=0.01)


def test_ahead_by_one_the_longer_of_sampling_and_learning_counts():
    found = simulate(setting(max_lag=1, learn=lambda tokens, terms: 3.0, publish=0.0, updates=8))
    assert found.step == pytest.approx(3.0, rel=0.05)
    assert found.learner_busy == pytest.approx(1.0, abs=0.02)
    shared = simulate(setting(max_lag=1, learn=lambda tokens, terms: 3.0, publish=0.0, updates=8, shared=True))
    assert shared.step == pytest.approx(4.0, rel=0.05)  # one device: sampling and learning take turns


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_nothing_older_than_the_bound_is_trained_on(lag):
    def draw(chance: random.Random):
        return (Turn(10, 20, chance.choice([0.0, 0.0, 0.0, 20.0])),)

    found = simulate(setting(draw=draw, max_lag=lag, updates=30, groups=8))
    assert 0 < found.lag <= found.lag_max <= lag
    waits = simulate(setting(draw=draw, updates=30, groups=8))
    assert found.step < waits.step


def test_a_group_with_members_to_spare_does_not_wait_for_its_slowest():
    def draw(chance: random.Random):
        return (Turn(10, 100, 50.0 if chance.random() < 0.05 else 0.0),)

    assert simulate(setting(draw=draw, redundancy=2)).step < simulate(setting(draw=draw)).step


def test_so_many_episodes_at_once_and_not_more():
    assert simulate(setting(concurrency=2)).wait == pytest.approx(4.0)
