"""Turns are what was said; rewards that read them are rewards like any other."""

from __future__ import annotations

import asyncio

import pytest

from arborl.conversational.environment import ConversationTurn, MultiTurnTrajectory, TrajectoryGroup
from arborl.rewards.text.base import RewardFunction, RewardResult, reward_function
from arborl.types import Episode, Message, Task, Turn


def episode(*replies: str) -> Episode:
    made = Episode("e", Task("t", fields={"topic": "parcels"}), opening=(Message("user", "Where is it?"),))
    made.turns = [Turn(Message("assistant", reply), (Message("user", "And now?"),), 0.5) for reply in replies]
    return made


def test_a_trajectory_has_all_that_was_said_in_order_with_each_replys_own_reward():
    found = MultiTurnTrajectory.of(episode("Here.", "There."))
    assert [(turn.role, turn.content) for turn in found.turns] == [
        ("user", "Where is it?"),
        ("assistant", "Here."),
        ("user", "And now?"),
        ("assistant", "There."),
        ("user", "And now?"),
    ]
    assert [turn.reward for turn in found.replies] == [0.5, 0.5]


def test_advantages_of_a_group_are_distances_from_its_mean():
    group = TrajectoryGroup("g", [MultiTurnTrajectory(str(r), [], r) for r in (0.7, 0.9, 0.6, 0.8)])
    assert group.advantages == pytest.approx([-0.05, 0.15, -0.15, 0.05])


def test_an_unknown_role_is_refused_by_name():
    with pytest.raises(ValueError, match="role='robot': give one of system, user, assistant, tool"):
        ConversationTurn("robot", "hello")


def test_a_class_and_a_decorated_function_score_episodes_as_rewards_do():
    class LongestReply(RewardFunction):
        async def compute_reward(self, turns, context=None):
            return RewardResult(float(max(len(turn.content) for turn in turns if turn.role == "assistant")))

    @reward_function(weight=0.5)
    def about(turns, context=None):
        return float(context["topic"] == "parcels")

    assert LongestReply().name == "longest_reply"
    assert (about.name, about.weight) == ("about", 0.5)
    assert asyncio.run(LongestReply()(episode("Here.", "Over there."))) == 11.0
    assert asyncio.run(about(episode("Here."))) == 1.0
