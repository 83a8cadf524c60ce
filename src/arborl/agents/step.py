"""Every step its own prompt: the rules, the last few steps, and what is seen now."""

from __future__ import annotations

from collections.abc import Sequence

from arborl.agents.agent import Agent, Model
from arborl.envs.env import Env
from arborl.types import Message, Task


class StepAgent(Agent):
    """Shows the model a window of the episode and not all of it.

    A step's prompt holds the opening's system messages, the last `history_length` steps whole (what was seen, what was
    said, valid or not) and the present observation; what came before is gone. So prompts stay short however long the
    episode is, each step is a branch of its own, and equal states with equal histories have equal prompts, which is
    what step-wise credit (`algorithm=gigpo`) compares.

    Example (history_length=1, third step):
        system     the rules
        user       what was seen in the second step
        assistant  what was said to it
        user       what is seen now

    Args:
        history_length: steps that are shown besides the present one; 0 for none.
        keep_opening: show what the user said at the start throughout, in front of the oldest observation. Without a
            word, where the opening has no system message: then the task itself is in it.
    """

    def __init__(self, history_length: int = 2, keep_opening: bool | None = None):
        if history_length < 0:
            raise ValueError(f"history_length={history_length}: give 0 or more")
        self.history_length, self.keep_opening = history_length, keep_opening

    async def run(self, task: Task, env: Env, model: Model) -> None:
        observation = await env.reset(task, task.seed)
        rules = [message for message in observation.messages if message.role == "system"]
        opening = [message for message in observation.messages if message.role != "system"]
        keep = not rules if self.keep_opening is None else self.keep_opening
        steps: list[list[Message]] = [opening]
        """Of each step what was seen, and then what was said to it; of the present one only the first."""
        while True:
            first = max(len(steps) - 1 - self.history_length, 0)
            before = opening if keep and first > 0 else []
            shown = [message for step in steps[first:] for message in step]
            message = await model.chat([*rules, *joined([*before, *shown])])
            answer = await env.step(message)
            if answer.over:
                return
            steps[-1] = [*steps[-1], message]
            steps.append(list(answer.observation.messages))


def joined(messages: Sequence[Message]) -> list[Message]:
    """The messages, where two of the user in a row are made one: many templates want the roles to alternate."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role == "user":
            out[-1] = Message("user", f"{out[-1].content}\n\n{message.content}")
        else:
            out.append(message)
    return out
