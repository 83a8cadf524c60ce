import asyncio

import pytest
from scripted_model import Script

from arborl.agents import AGENTS
from arborl.agents.chat_agents import ChatAgent
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.errors import ContextFull
from arborl.types import Message, Task


class Countdown(Env):
    async def reset(self, task, seed):
        self.left, self.heard = 3, []
        return Observation((Message("system", "Count."), Message("user", "3")))

    async def step(self, action):
        self.heard.append(action.content)
        self.left -= 1
        return Step(Observation((Message("user", str(self.left)),)), terminated=self.left == 0)


def test_the_conversation_grows_until_it_is_over_or_full():
    env, model = Countdown(), Script("a", "b", "c", "d")
    asyncio.run(ChatAgent().run(Task("t"), env, model))
    assert env.heard == ["a", "b", "c"]
    assert not model.counts
    last = [message.content for message in model.prompts[-1]]
    assert last == ["Count.", "3", "a", "2", "b", "1"]
    for before, after in zip(model.prompts, model.prompts[1:], strict=False):
        assert after[: len(before)] == before

    with pytest.raises(ContextFull):
        asyncio.run(ChatAgent().run(Task("t"), Countdown(), Script("a")))


def test_the_oracle_wins_through_the_loop():
    env = FrozenLake()

    class Oracle(Script):
        async def chat(self, messages, tools=()):
            return Message("assistant", env.oracle())

    asyncio.run(ChatAgent().run(Task("t", seed=5), env, Oracle()))
    assert env.metrics()["success"] == 1


def test_every_agent_in_the_table_can_be_built():
    for name in AGENTS:
        own = {"command": ["python", __file__]} if name == "endpoint" else {}
        assert AGENTS.build(name, own, "agent.args")
