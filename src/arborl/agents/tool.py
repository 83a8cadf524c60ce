"""The loop with tools: calls are answered by the toolbox, everything else goes to the environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arborl.agents.agent import Agent, Model
from arborl.envs.env import Env
from arborl.tools.tool import Tool
from arborl.tools.toolbox import Toolbox
from arborl.types import Message, Task, ToolCall, ToolResult


class ToolAgent(Agent):
    """Lets the model call tools before it acts.

    Args:
        tools: what it may call.
        max_tool_rounds: messages with calls that are answered before one step of the environment; the message after
            that goes to the environment as it is.
    """

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = (), max_tool_rounds: int = 8):
        if max_tool_rounds < 0:
            raise ValueError(f"max_tool_rounds={max_tool_rounds}: give 0 or more")
        self.toolbox = Toolbox(tools)
        self.max_tool_rounds = max_tool_rounds

    async def run(self, task: Task, env: Env, model: Model) -> None:
        observation = await env.reset(task, task.seed)
        messages = list(observation.messages)
        while True:
            message = await self._act(messages, model)
            step = await env.step(message)
            if step.over:
                return
            messages += [message, *step.observation.messages]

    async def _act(self, messages: list[Message], model: Model) -> Message:
        """The model's next message to the environment; the rounds with tools before it are added to `messages`."""
        for _ in range(self.max_tool_rounds):
            message = await model.chat(messages, self.toolbox.specs)
            if not message.tool_calls:
                return message
            results = await self.toolbox.run(message.tool_calls)
            count(results, model)
            messages += [message, *map(answer, message.tool_calls, results)]
        return await model.chat(messages, self.toolbox.specs)


def answer(call: ToolCall, result: ToolResult) -> Message:
    """A tool's result as the message the model reads."""
    return Message("tool", result.content, tool_call_id=call.id, name=call.name)


def count(results: Sequence[ToolResult], model: Model) -> None:
    """Add these results to the episode's metrics: all, those that failed, and the failures by kind."""
    for result in results:
        model.count({"tool/calls": 1.0})
        if not result.ok:
            model.count({"tool/failed": 1.0, f"tool/{result.kind}": 1.0})
