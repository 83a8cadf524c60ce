"""One question, one answer: the episode is over with the first message, and rewards judge it."""

from __future__ import annotations

from arborl.envs.env import Env, Observation, Step
from arborl.types import Message, Task


class Question(Env):
    """Shows the task's messages and takes the answer. Its own reward is always 0."""

    async def reset(self, task: Task, seed: int) -> Observation:
        if not task.messages:
            raise ValueError(
                f"task {task.id!r} has no messages; give data with a question, or an environment of its own"
            )
        self.text = "\n".join(message.content for message in task.messages)
        self.key = task.id
        return Observation(task.messages, state_key=self.key)

    async def step(self, action: Message) -> Step:
        self.text = f"{self.text}\n{action.content}"
        return Step(Observation((), state_key=f"{self.key}/answered"), terminated=True)

    def render(self) -> str:
        return self.text
