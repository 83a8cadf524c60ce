"""The plain loop: say something, hear the environment's answer, until it is over."""

from __future__ import annotations

from arborl.agents.agent import Agent, Model
from arborl.agents.context.policy import Policy
from arborl.agents.context.talk import Talk
from arborl.envs.env import Env
from arborl.types import Task


class ChatAgent(Agent):
    """Keeps the whole conversation and adds to it.

    Args:
        context: what is done when it outgrows the window; nothing by default.
    """

    context: Policy | None = None

    def __init__(self, context: Policy | None = None):
        self.context = context

    async def run(self, task: Task, env: Env, model: Model) -> None:
        observation = await env.reset(task, task.seed)
        with Talk(model, observation.messages, self.context) as talk:
            while True:
                message = await talk.ask()
                step = await env.step(message)
                if step.over:
                    return
                talk.add(message)
                talk.hear(step.observation.messages)
