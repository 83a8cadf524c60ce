"""A model that says what a test wrote, an environment that remembers what it heard, and a tool."""

import asyncio
from collections import Counter

from arborl.envs.games.question import Question
from arborl.errors import ContextFull
from arborl.tools import tool
from arborl.types import Message, Task

TASK = Task("t", (Message("system", "Be brief."), Message("user", "What is 6*7?")), {"answer": "42"})


class Script:
    def __init__(self, *replies):
        self.replies, self.counts = list(replies), Counter()
        self.prompts, self.tools, self.stops = [], [], []

    async def chat(self, messages, tools=(), *, stop=()):
        self.prompts.append(list(messages))
        self.tools.append(tools)
        self.stops.append(stop)
        if not self.replies:
            raise ContextFull("no more")
        reply = self.replies.pop(0)
        return reply if isinstance(reply, Message) else Message("assistant", reply, sampled=True)

    def count(self, metrics):
        self.counts.update({name: value for name, value in metrics.items() if value and name != "tool/offered"})


class Heard(Question):
    async def step(self, action):
        self.heard = action.content
        return await super().step(action)


@tool
def double(x: int) -> int:
    """Double a number."""
    return 2 * x


def play(agent, *replies, env=None):
    """The model after an episode, and what the environment heard last."""
    model, env = Script(*replies), env or Heard()
    asyncio.run(agent.run(TASK, env, model))
    return model, env.heard
