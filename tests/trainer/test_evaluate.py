"""What a policy's measurement says of episodes that failed."""

from __future__ import annotations

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
    assert headline(groups) == {"success": 0.5, "reward": 0.5, "failed": 1.0}


def test_nothing_is_said_of_failures_where_there_are_none():
    assert headline([Group(Task("t"), [episode(1.0)])]) == {"success": 1.0, "reward": 1.0}
