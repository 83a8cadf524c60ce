"""Policies side by side: the numbers, and what chance alone would say."""

from __future__ import annotations

import doctest

import pytest

from arborl.trainer import standings
from arborl.trainer.standings import Played, compare
from arborl.types import Episode, Failure, Group, Task


def group(name: str, *given: float | None, source: str = "") -> Group:
    """A task, and how its attempts went; None failed."""
    task = Task(name, source=source)
    episodes = []
    for value in given:
        made = Episode("e", task)
        if value is None:
            made.failure = Failure("engine", "error", "broke", "")
        else:
            made.rewards["env"], made.metrics["success"] = value, value
        episodes.append(made)
    return Group(task, episodes)


def played(*groups: Group, name: str = "one") -> Played:
    return Played(name, "sampled", {}, list(groups))


def test_the_worked_examples_hold():
    assert doctest.testmod(standings).failed == 0


def test_several_attempts_give_pass_at_k_and_pass_all_k():
    scores = played(group("a", 1, 0, 0, 0), group("b", 1, 1, 1, 1)).scores()
    assert list(scores) == ["success", "reward", "pass@2", "pass^2", "pass@4", "pass^4"]
    assert scores["success"].mean == 0.625
    assert (scores["pass@2"].mean, scores["pass^2"].mean) == (0.75, 0.5)
    assert (scores["pass@4"].mean, scores["pass^4"].mean) == (1.0, 0.5)


def test_a_failed_attempt_is_no_pass():
    scores = played(group("a", 1, None), group("b", 1, 1)).scores()
    assert scores["pass^2"].mean == 0.5
    assert played(group("a", 1, None)).count() == (1, 2, 1)


def test_where_all_tasks_went_alike_the_interval_is_wilsons_and_a_reward_has_none():
    scores = played(*(group(str(n), 0) for n in range(20))).scores()
    assert scores["success"].high == pytest.approx(0.161, abs=1e-3)
    assert scores["reward"].high is None


def test_a_bootstrap_is_the_same_every_time_and_near_the_textbook_interval():
    one = played(*(group(str(n), n % 2) for n in range(100))).scores()["reward"]
    assert one == played(*(group(str(n), n % 2) for n in range(100))).scores()["reward"]
    assert (one.low, one.high) == (pytest.approx(0.40, abs=0.02), pytest.approx(0.60, abs=0.02))


def test_each_of_several_sources_has_its_scores():
    both = played(group("a", 1, source="math"), group("b", 0, source="code"))
    assert both.sources == ["math", "code"]
    assert both.scores("code")["success"].mean == 0
    assert played(group("a", 1, source="math")).sources == []


def test_two_policies_are_compared_on_the_tasks_that_both_played():
    first = played(*(group(str(n), 0) for n in range(10)), group("alone", 1))
    second = played(*(group(str(n), float(n < 8)) for n in range(10)), name="two")
    (pair,) = compare([first, second])
    assert (pair.first, pair.second, pair.metric, pair.tasks) == ("one", "two", "success", 10)
    assert pair.difference == 0.8
    assert pair.p == 2 / 2**8  # all eight differ to one side
    assert pair.low is not None
    assert pair.low > 0


def test_equal_policies_differ_by_chance_alone():
    (pair,) = compare([played(group("a", 1)), played(group("a", 1), name="two")])
    assert (pair.difference, pair.p) == (0, 1)
    many = [float(n % 2) for n in range(60)]
    ways = compare(
        [
            played(*(group(str(n), value) for n, value in enumerate(many))),
            played(*(group(str(n), 1 - value) for n, value in enumerate(many)), name="two"),
        ]
    )
    assert ways[0].p == 1


def test_policies_without_a_common_task_or_another_way_are_not_compared():
    assert compare([played(group("a", 1)), played(group("b", 1), name="two")]) == []
    assert compare([played(group("a", 1)), Played("two", "greedy", {}, [group("a", 1)])]) == []


def test_what_nobody_judged_has_no_scores():
    assert Played("one", "sampled", {}, [group("a", 0)], judged=False).scores() == {}
