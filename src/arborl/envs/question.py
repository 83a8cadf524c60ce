"""One question, one answer: the episode is over with the first message, and rewards judge it."""

from __future__ import annotations

from arborl.envs.answers import answer
from arborl.envs.env import Env, Observation, Step
from arborl.types import Message, Task


class Question(Env):
    """Answer the question of a task.

    Shows the task's messages and takes the answer. Its own reward is always 0: rewards judge it.
    """

    blocking = False

    async def reset(self, task: Task, seed: int) -> Observation:
        if not task.messages:
            raise ValueError(
                f"task {task.id!r} has no messages; give data with a question, or an environment of its own"
            )
        self.text = "\n".join(message.content for message in task.messages)
        self.key, self.right = task.id, task.fields.get("answer")
        return Observation(task.messages, state_key=self.key)

    async def step(self, action: Message) -> Step:
        self.text = f"{self.text}\n{action.content}"
        self.key = f"{self.key}/answered"
        return Step(Observation((), state_key=self.key), terminated=True)

    def oracle(self) -> str | None:
        """The row's `answer`, if it has one."""
        return None if self.right is None else answer(str(self.right))

    def state_key(self) -> str:
        return self.key

    def render(self) -> str:
        return self.text
