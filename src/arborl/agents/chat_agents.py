"""Agents without tools: the whole conversation as prompt, or a window of the last steps."""

from __future__ import annotations

from collections.abc import Sequence

from arborl.agents.agent_interface import Agent, Model
from arborl.agents.context.managed_conversation import ContextPolicy, ManagedConversation
from arborl.envs.env import Env
from arborl.types import Message, Task


class ChatAgent(Agent):
    """Appends every message to one conversation.

    Args:
        context: policy for a conversation that exceeds the context window; none by default.
    """

    context: ContextPolicy | None = None

    def __init__(self, context: ContextPolicy | None = None):
        self.context = context

    async def run(self, task: Task, env: Env, model: Model) -> None:
        observation = await env.reset(task, task.seed)
        with ManagedConversation(model, observation.messages, self.context) as conversation:
            while True:
                message = await conversation.sample()
                step = await env.step(message)
                if step.over:
                    return
                conversation.add(message)
                conversation.observe(step.observation.messages)


class StepAgent(Agent):
    """Builds a separate prompt for each step, from a window of the episode.

    The prompt holds the system messages, the last `history_length` steps (observation and action) and the current
    observation. Prompts stay short in long episodes, each step is a separate branch, and equal states with equal
    histories have equal prompts, which step-wise credit (`algorithm=gigpo`) compares.

    Example (history_length=1, third step):
        system     the rules
        user       observation of the second step
        assistant  action of the second step
        user       current observation

    Args:
        history_length: earlier steps in the prompt; 0 for none.
        keep_opening: keep the first user messages in every prompt. By default if there is no system message, because
            then they contain the task.
    """

    def __init__(self, history_length: int = 2, keep_opening: bool | None = None):
        if history_length < 0:
            raise ValueError(f"history_length={history_length}: give 0 or more")
        self.history_length, self.keep_opening = history_length, keep_opening

    async def run(self, task: Task, env: Env, model: Model) -> None:
        observation = await env.reset(task, task.seed)
        system = [message for message in observation.messages if message.role == "system"]
        opening = [message for message in observation.messages if message.role != "system"]
        keep_opening = not system if self.keep_opening is None else self.keep_opening
        steps: list[list[Message]] = [opening]
        """Observation and action of each step; of the current step only the observation."""
        while True:
            first = max(len(steps) - 1 - self.history_length, 0)
            before = opening if keep_opening and first > 0 else []
            shown = [message for step in steps[first:] for message in step]
            message = await model.chat([*system, *merge_user_messages([*before, *shown])])
            result = await env.step(message)
            if result.over:
                return
            steps[-1] = [*steps[-1], message]
            steps.append(list(result.observation.messages))


def merge_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive user messages: many chat templates require alternating roles."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role == "user":
            out[-1] = Message("user", f"{out[-1].content}\n\n{message.content}")
        else:
            out.append(message)
    return out
