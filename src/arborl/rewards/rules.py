"""Rewards that follow a rule."""

from __future__ import annotations

from typing import Any

from arborl.rewards.numbers import final_part, read_number, same_number
from arborl.rewards.reward import reward
from arborl.types import Episode


@reward(blocking=False)
def environment(episode: Episode) -> float:
    """What the environment gave, summed over the turns. Its short name is `env`."""
    return sum(turn.reward for turn in episode.turns)


environment.by_turn = True

POSTED = "endpoint/reward"
"""The metric that holds what a program of agent `endpoint` said its episode was worth."""


@reward(blocking=False)
def posted(episode: Episode) -> float:
    """What the program that played said it was worth, with agent `endpoint`."""
    if POSTED not in episode.metrics:
        raise LookupError(
            'the program posted no reward. Let it POST {"reward": 1.0} to $ARBORL_EPISODE_URL/reward before it ends, '
            "or choose another reward"
        )
    return episode.metrics[POSTED]


@reward(blocking=False)
def exact(episode: Episode, answer: Any) -> float:
    """1 where the final answer is the task's `answer`, else 0.

    White space does not matter, nor how a number is written: `1,000` and `1000.0` are equal.
    """
    return float(same(final_part(episode.answer), str(answer)))


def same(given: str, wanted: str) -> bool:
    """Equal as text or, where both are numbers, as numbers."""
    left, right = read_number(given), read_number(wanted)
    if left is not None and right is not None:
        return same_number(left, right)
    return " ".join(given.split()) == " ".join(wanted.split())
