"""Trajectories, rewards over turns, system prompts of environments, and settings of GSPO."""

from __future__ import annotations

import asyncio

import pytest

from arborl import AgentConfig, Environment, EnvironmentState, GSPOConfig
from arborl.conversational.environment import ConversationTurn, MultiTurnTrajectory, TrajectoryGroup
from arborl.errors import ConfigError
from arborl.rewards.text.text_reward import RewardFunction, RewardResult, reward_function
from arborl.types import Episode, Message, Task, Turn


def episode(*replies: str) -> Episode:
    made = Episode("e", Task("t", fields={"topic": "parcels"}), opening=(Message("user", "Where is it?"),))
    made.turns = [Turn(Message("assistant", reply), (Message("user", "And now?"),), 0.5) for reply in replies]
    return made


def test_a_trajectory_has_all_turns_in_order_with_the_reward_of_each_reply():
    trajectory = MultiTurnTrajectory.of(episode("Here.", "There."))
    assert [turn.role for turn in trajectory.turns] == ["user", "assistant", "user", "assistant", "user"]
    assert [turn.content for turn in trajectory.turns[:3]] == ["Where is it?", "Here.", "And now?"]
    assert [turn.reward for turn in trajectory.replies] == [0.5, 0.5]


def test_advantages_of_a_group_are_rewards_minus_their_mean():
    group = TrajectoryGroup("g", [MultiTurnTrajectory(str(r), [], r) for r in (0.7, 0.9, 0.6, 0.8)])
    assert group.advantages == pytest.approx([-0.05, 0.15, -0.15, 0.05])


def test_an_unknown_role_is_an_error():
    with pytest.raises(ValueError, match="role='robot'"):
        ConversationTurn("robot", "hello")


def test_a_class_and_a_decorated_function_are_rewards():
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


@pytest.mark.parametrize(
    ("opening", "expected"),
    [
        ((), [("system", "Be brief.")]),
        (({"role": "user", "content": "Hello!"},), [("system", "Be brief."), ("user", "Hello!")]),
        (({"role": "system", "content": "Be kind."},), [("system", "Be kind.")]),
    ],
)
def test_the_system_prompt_of_an_environment_is_shown_unless_reset_returns_one(opening, expected):
    class Brief(Environment):
        system = "Be brief."

        async def reset(self, scenario=None):
            return EnvironmentState(opening)

        async def step(self, state, action):
            return state, None, 0.0, True

    observation = asyncio.run(Brief().as_env().reset(Task("one"), 0))
    assert [(message.role, message.content) for message in observation.messages] == expected


def test_beta_of_gspo_is_its_kl_coefficient():
    assert GSPOConfig(beta=0.1).run_settings(AgentConfig())["algorithm"]["kl"] == {"coef": 0.1}
    assert "kl" not in GSPOConfig().run_settings(AgentConfig())["algorithm"]
    with pytest.raises(ConfigError, match="beta and kl_penalty"):
        GSPOConfig(beta=0.1, kl_penalty=0.1).run_settings(AgentConfig())
