"""The plain loop: say something, hear the environment's answer, until it is over."""

from __future__ import annotations

from arborl.agents.agent import Agent, Model
from arborl.envs.env import Env
from arborl.types import Task


class ChatAgent(Agent):
    """Keeps the whole conversation and adds to it."""

    async def run(self, task: Task, env: Env, model: Model) -> None:
        observation = await env.reset(task, task.seed)
        messages = list(observation.messages)
        while True:
            message = await model.chat(messages)
            step = await env.step(message)
            if step.over:
                return
            messages += [message, *step.observation.messages]
