"""One question: the first answer ends the episode, or wrong answers are told so and may be corrected; rewards judge."""

from __future__ import annotations

import re
from typing import Any

from arborl.envs.env import Env, Observation, Step, format_answer
from arborl.tools.library.finish import check
from arborl.types import Message, Task

ANSWER = r"<answer>(.*?)</answer>|####\s*([^\n]+)|\\boxed\{([^{}]*)\}"


class Question(Env):
    """Shows the task's messages and ends with the first reply. Its reward is 0; rewards judge the reply.

    With several `attempts`, a reply that is not the task's field `answer` gets `feedback`, and the model may answer
    again. Numbers are compared as numbers, other answers as text.

    Args:
        attempts: maximum replies.
        feedback: message after a wrong reply.
        pattern: regular expression that finds the answer in a reply: the first group with text of its last match. A
            reply without a match is wrong.
    """

    blocking = False

    def __init__(
        self, attempts: int = 1, feedback: str = "This answer is wrong. Try again.", pattern: str = ANSWER
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts={attempts}: give 1 or more")
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern={pattern!r}: not a regular expression: {error}") from error
        self.attempts, self.feedback = attempts, feedback

    async def reset(self, task: Task, seed: int) -> Observation:
        if not task.messages:
            raise ValueError(f"task {task.id!r} has no messages: give data with a question, or another environment")
        self.text = "\n".join(message.content for message in task.messages)
        self.key, self.solution, self.left = task.id, task.fields.get("answer"), self.attempts
        if self.attempts > 1 and self.solution is None:
            raise ValueError(f"task {task.id!r} has no field `answer`, which attempts={self.attempts} is compared with")
        return Observation(task.messages, state_key=self.key)

    async def step(self, action: Message) -> Step:
        self.left -= 1
        self.text = f"{self.text}\n{action.content}"
        self.key = f"{self.key}/answered"
        if self.left and not self._is_right(action.content):
            self.text = f"{self.text}\n{self.feedback}"
            return Step(Observation((Message("user", self.feedback),), state_key=self.key))
        return Step(Observation((), state_key=self.key), terminated=True)

    def _is_right(self, reply: str) -> bool:
        matches = list(self.pattern.finditer(reply))
        if not matches:
            return False
        last = matches[-1]
        found: Any = next((group for group in last.groups() if group), last[0])
        return check(found, self.solution) == "right"

    def oracle(self) -> str | None:
        """The task's field `answer`, if present."""
        return None if self.solution is None else format_answer(str(self.solution))

    def state_key(self) -> str:
        return self.key

    def render(self) -> str:
        return self.text
