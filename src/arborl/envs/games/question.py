"""One question, one answer: the first message ends the episode; rewards judge it."""

from __future__ import annotations

from arborl.envs.env import Env, Observation, Step, format_answer
from arborl.types import Message, Task


class Question(Env):
    """Shows the task's messages and ends with the first reply. Its reward is 0; rewards judge the reply."""

    blocking = False

    async def reset(self, task: Task, seed: int) -> Observation:
        if not task.messages:
            raise ValueError(f"task {task.id!r} has no messages: give data with a question, or another environment")
        self.text = "\n".join(message.content for message in task.messages)
        self.key, self.solution = task.id, task.fields.get("answer")
        return Observation(task.messages, state_key=self.key)

    async def step(self, action: Message) -> Step:
        self.text = f"{self.text}\n{action.content}"
        self.key = f"{self.key}/answered"
        return Step(Observation((), state_key=self.key), terminated=True)

    def oracle(self) -> str | None:
        """The task's field `answer`, if present."""
        return None if self.solution is None else format_answer(str(self.solution))

    def state_key(self) -> str:
        return self.key

    def render(self) -> str:
        return self.text
