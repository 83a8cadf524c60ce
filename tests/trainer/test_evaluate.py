"""What a policy's measurement says of episodes that failed."""

from __future__ import annotations

import doctest

import pytest

from arborl.trainer import intervals
from arborl.trainer.evaluate import headline
from arborl.types import Episode, Failure, Group, Task


def episode(success: float | None) -> Episode:
    made = Episode("e", Task("t"))
    if success is None:
        made.failure = Failure("engine", "error", "broke", "")
    else:
        made.rewards["env"], made.metrics["success"] = success, success
    return made


def test_a_failed_episode_counts_as_no_success_and_is_named():
    groups = [Group(Task("t"), [episode(given)]) for given in (1.0, 1.0, 0.0, None)]
    found = headline(groups)
    assert (found["tasks"], found["success"], found["reward"], found["failed"]) == (4.0, 0.5, 0.5, 1.0)


def test_that_nothing_failed_is_said_too():
    assert headline([Group(Task("t"), [episode(1.0)])])["failed"] == 0.0


def test_where_everything_failed_nothing_was_measured():
    assert headline([Group(Task("t"), [episode(None)])] * 3) == {"tasks": 3.0, "failed": 3.0}


def test_success_that_nobody_judged_is_not_said():
    unjudged = episode(1.0)
    del unjudged.metrics["success"]
    found = headline([Group(Task("t"), [unjudged])] * 3)
    assert "success" not in found
    assert found["reward"] == 1.0


def test_intervals_are_wilsons_for_shares_and_students_for_rewards():
    found = headline([Group(Task("t"), [episode(given)]) for given in [1.0] * 10 + [0.0] * 10])
    assert (round(found["success_low"], 3), round(found["success_high"], 3)) == (0.299, 0.701)  # the books' number
    assert (round(found["reward_low"], 3), round(found["reward_high"], 3)) == (0.26, 0.74)
    alone = headline([Group(Task("t"), [episode(1.0)])])
    assert "reward_low" not in alone
    assert alone["success_low"] < 0.25


def test_episodes_of_one_task_are_one_vote_for_the_interval():
    alone = headline([Group(Task("t"), [episode(given)]) for given in (1.0, 0.0)])
    repeated = headline([Group(Task("t"), [episode(given)] * 50) for given in (1.0, 0.0)])
    assert repeated == alone


def test_the_intervals_agree_with_the_textbooks():
    assert doctest.testmod(intervals).failed == 0
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
    for freedom, point in table.items():
        assert intervals.quantile(freedom) == pytest.approx(point, rel=2e-3)


def test_a_reward_that_is_only_shown_is_measured_beside_the_one_that_is_learned():
    shown = episode(1.0)
    shown.metrics |= {"reward/polite": 0.25, "reward/composite/part": 0.5}
    found = headline([Group(Task("t"), [shown])] * 3)
    assert (found["reward"], found["reward/polite"]) == (1.0, 0.25)
    assert "reward/composite/part" not in found
