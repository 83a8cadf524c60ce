"""Comparison of policies: pass@k, intervals and paired tests."""

from __future__ import annotations

import doctest

import pytest

from arborl.trainer import policy_comparison
from arborl.trainer.policy_comparison import PolicyResult, compare_policies
from arborl.types import Episode, Failure, Group, Task


def group(name: str, *values: float | None, source: str = "") -> Group:
    """The episodes of a task by success; None for a failed one."""
    task = Task(name, source=source)
    episodes = []
    for value in values:
        made = Episode("e", task)
        if value is None:
            made.failure = Failure("engine", "error", "broke", "")
        else:
            made.rewards["env"], made.metrics["success"] = value, value
        episodes.append(made)
    return Group(task, episodes)


def result(*groups: Group, name: str = "one") -> PolicyResult:
    return PolicyResult(name, "sampled", {}, list(groups))


def test_the_doctests_pass():
    assert doctest.testmod(policy_comparison).failed == 0


def test_several_attempts_give_pass_at_k_and_pass_all_k():
    scores = result(group("a", 1, 0, 0, 0), group("b", 1, 1, 1, 1)).scores()
    assert list(scores) == ["success", "reward", "pass@2", "pass^2", "pass@4", "pass^4"]
    assert scores["success"].mean == 0.625
    assert (scores["pass@2"].mean, scores["pass^2"].mean) == (0.75, 0.5)
    assert (scores["pass@4"].mean, scores["pass^4"].mean) == (1.0, 0.5)


def test_a_failed_attempt_is_no_pass():
    scores = result(group("a", 1, None), group("b", 1, 1)).scores()
    assert scores["pass^2"].mean == 0.5
    assert result(group("a", 1, None)).count() == (1, 2, 1)


def test_equal_tasks_have_a_wilson_interval_for_success_and_none_for_the_reward():
    scores = result(*(group(str(n), 0) for n in range(20))).scores()
    assert scores["success"].high == pytest.approx(0.161, abs=1e-3)
    assert scores["reward"].high is None


def test_a_bootstrap_is_deterministic_and_near_the_textbook_interval():
    one = result(*(group(str(n), n % 2) for n in range(100))).scores()["reward"]
    assert one == result(*(group(str(n), n % 2) for n in range(100))).scores()["reward"]
    assert (one.low, one.high) == (pytest.approx(0.40, abs=0.02), pytest.approx(0.60, abs=0.02))


def test_each_of_several_sources_has_its_scores():
    both = result(group("a", 1, source="math"), group("b", 0, source="code"))
    assert both.sources == ["math", "code"]
    assert both.scores("code")["success"].mean == 0
    assert result(group("a", 1, source="math")).sources == []


def test_two_policies_are_compared_on_their_common_tasks():
    first = result(*(group(str(n), 0) for n in range(10)), group("alone", 1))
    second = result(*(group(str(n), float(n < 8)) for n in range(10)), name="two")
    (pair,) = compare_policies([first, second])
    assert (pair.first, pair.second, pair.metric, pair.tasks) == ("one", "two", "success", 10)
    assert pair.difference == -0.8  # the first minus the second
    assert pair.p == 2 / 2**8  # all eight differ to one side
    assert pair.low is not None
    assert pair.high < 0


def test_equal_policies_have_p_1():
    (pair,) = compare_policies([result(group("a", 1)), result(group("a", 1), name="two")])
    assert (pair.difference, pair.p) == (0, 1)
    many = [float(n % 2) for n in range(60)]
    pairs = compare_policies(
        [
            result(*(group(str(n), value) for n, value in enumerate(many))),
            result(*(group(str(n), 1 - value) for n, value in enumerate(many)), name="two"),
        ]
    )
    assert pairs[0].p == 1


def test_policies_without_a_common_task_or_decoding_are_not_compared():
    assert compare_policies([result(group("a", 1)), result(group("b", 1), name="two")]) == []
    assert compare_policies([result(group("a", 1)), PolicyResult("two", "greedy", {}, [group("a", 1)])]) == []


def test_unscored_episodes_have_no_scores():
    assert PolicyResult("one", "sampled", {}, [group("a", 0)], judged=False).scores() == {}
