"""Evaluation metrics: failed episodes, intervals, rewards of weight 0."""

from __future__ import annotations

import doctest

import pytest

from arborl.trainer import evaluation
from arborl.trainer.evaluation import evaluation_metrics
from arborl.trainer.policy_comparison import PolicyResult, compare_pair
from arborl.trainer.step_metrics import episode_metrics
from arborl.types import Episode, Failure, Group, Message, Task, Turn


def episode(success: float | None) -> Episode:
    made = Episode("e", Task("t"))
    if success is None:
        made.failure = Failure("engine", "error", "broke", "")
    else:
        made.rewards["env"], made.metrics["success"] = success, success
    return made


def test_a_failed_episode_counts_as_0():
    groups = [Group(Task("t"), [episode(value)]) for value in (1.0, 1.0, 0.0, None)]
    found = evaluation_metrics(groups)
    assert (found["tasks"], found["success"], found["reward"], found["failed"]) == (4.0, 0.5, 0.5, 1.0)


def test_without_a_surviving_episode_nothing_is_measured():
    assert evaluation_metrics([Group(Task("t"), [episode(None)])] * 3) == {"tasks": 3.0, "failed": 3.0}


def test_success_is_absent_if_no_part_reports_it():
    unjudged = episode(1.0)
    del unjudged.metrics["success"]
    found = evaluation_metrics([Group(Task("t"), [unjudged])] * 3)
    assert "success" not in found
    assert found["reward"] == 1.0


def test_tasks_without_a_success_value_do_not_lower_the_success_of_others():
    degrees = episode(0.5)
    del degrees.metrics["success"]
    groups = [Group(Task(f"t{i}"), [one]) for i, one in enumerate([episode(1.0), episode(1.0), degrees, episode(None)])]
    found = evaluation_metrics(groups)
    assert found["success"] == pytest.approx(2 / 3)  # the failed episode counts as 0
    assert found["reward"] == 2.5 / 4
    assert episode_metrics(groups)["episode/success"] == 1.0
    result = PolicyResult("policy", "sampled", found, groups)
    assert result.scores()["success"].mean == pytest.approx(2 / 3)
    pair = compare_pair(result, result)
    assert pair is not None
    assert (pair.metric, pair.tasks) == ("success", 3)
    pair = compare_pair(*[PolicyResult("policy", "sampled", {}, groups[2:3])] * 2)
    assert pair is not None
    assert (pair.metric, pair.tasks) == ("reward", 1)


def test_shares_have_wilson_intervals_and_rewards_student_intervals():
    found = evaluation_metrics([Group(Task("t"), [episode(value)]) for value in [1.0] * 10 + [0.0] * 10])
    assert (round(found["success_low"], 3), round(found["success_high"], 3)) == (0.299, 0.701)  # the books' number
    assert (round(found["reward_low"], 3), round(found["reward_high"], 3)) == (0.26, 0.74)
    alone = evaluation_metrics([Group(Task("t"), [episode(1.0)])])
    assert "reward_low" not in alone
    assert alone["success_low"] < 0.25


def test_several_episodes_of_a_task_count_as_one_sample():
    alone = evaluation_metrics([Group(Task("t"), [episode(value)]) for value in (1.0, 0.0)])
    repeated = evaluation_metrics([Group(Task("t"), [episode(value)] * 50) for value in (1.0, 0.0)])
    assert repeated == alone


def test_intervals_equal_the_textbook_values():
    assert doctest.testmod(evaluation).failed == 0
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
    for freedom, point in table.items():
        assert evaluation.t_quantile(freedom) == pytest.approx(point, rel=2e-3)


def test_a_reward_of_weight_0_has_its_own_metric():
    shown = episode(1.0)
    shown.metrics |= {"reward/polite": 0.25, "reward/composite/part": 0.5}
    found = evaluation_metrics([Group(Task("t"), [shown])] * 3)
    assert (found["reward"], found["reward/polite"]) == (1.0, 0.25)
    assert "reward/composite/part" not in found


def walk(*states: str) -> Episode:
    made = episode(1.0)
    made.turns.extend(Turn(Message("assistant", "go"), state_key=state) for state in states)
    return made


def test_shared_states_are_turns_after_the_first_whose_state_occurs_in_another_episode_of_the_group():
    groups = [
        Group(Task("t"), [walk("start", "a", "b"), walk("start", "a", "c", "c"), walk("start", "start", "")]),
        Group(Task("u"), [walk("start", "d"), walk("start", "e", "b")]),  # `b` of another task is another state
    ]
    assert episode_metrics(groups)["group/shared_states"] == 3 / 9  # `a` twice, and the return to `start`


def test_shared_states_are_absent_without_state_keys_or_later_turns():
    for episodes in ([walk("", ""), walk("", "")], [walk("start"), walk("start")]):
        assert "group/shared_states" not in episode_metrics([Group(Task("t"), episodes)])


def test_a_failed_episode_shares_no_states():
    failed = walk("start", "a")
    failed.failure = Failure("engine", "error", "broke", "")
    assert episode_metrics([Group(Task("t"), [walk("start", "a"), failed])])["group/shared_states"] == 0.0
