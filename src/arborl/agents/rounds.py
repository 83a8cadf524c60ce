"""The loop of agents that work before they act: rounds with tools, then one message to the environment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from arborl.agents.agent import Agent, Model
from arborl.agents.context.policy import Policy
from arborl.agents.context.talk import Talk
from arborl.envs.env import Env
from arborl.tools.core.tool_context import ToolContext
from arborl.types import Message, Task, ToolCall, ToolResult, ToolSpec

KINDS = ("unknown_tool", "malformed", "arguments", "exception", "timeout")
"""How a call of a tool can fail; a tool behind HTTP adds its own."""
NONE_YET = dict.fromkeys(("tool/used", "tool/calls", "tool/failed", *(f"tool/{kind}" for kind in KINDS)), 0.0)
"""Counters of an episode in which no tool has been called."""


@dataclass(frozen=True, slots=True)
class Act:
    """What a round ended with: a message for the environment."""

    said: Message
    """As the model wrote it; this is what it sees of it later."""
    action: Message
    """What the environment is told."""
    ends: bool = False
    """The agent is done, whatever the environment answers."""


class RoundsAgent(Agent):
    """Plays an episode in rounds. A kind of agent is how it asks the model, and what it does with what the model said.

    Args:
        max_tool_rounds: rounds before one step of the environment; the message after them goes to the environment.
        context: what is done when the conversation outgrows the window; nothing by default.
    """

    offered = 1
    """Tools the model may call."""
    specs: tuple[ToolSpec, ...] = ()
    """Those of which the chat template tells it."""
    context: Policy | None = None

    def __init__(self, max_tool_rounds: int = 8, context: Policy | None = None):
        self.context = context
        if max_tool_rounds < 0:
            raise ValueError(f"max_tool_rounds={max_tool_rounds}: give 0 or more")
        self.max_tool_rounds = max_tool_rounds

    @abstractmethod
    async def ask(self, messages: Sequence[Message], model: Model) -> Message:
        """The model's next message."""

    @abstractmethod
    async def work(self, message: Message, context: ToolContext, model: Model, last: bool) -> Act | list[Message]:
        """What follows from a message: what the model is answered; or, always where it is the last, an act."""

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as it begins."""
        return list(messages)

    async def run(self, task: Task, env: Env, model: Model) -> None:
        model.count({"tool/offered": float(self.offered), **NONE_YET})
        async with ToolContext(task, getattr(model, "tokenizer", None)) as context:
            observation = await env.reset(task, task.seed)
            with Talk(model, self.opening(observation.messages), self.context, self.specs) as talk:
                while True:
                    act = await self._act(talk, context, model)
                    step = await env.step(act.action)
                    if step.over or act.ends:
                        return
                    talk.add(act.said)
                    talk.hear(step.observation.messages)

    async def _act(self, talk: Talk, context: ToolContext, model: Model) -> Act:
        """The model's next message to the environment; the rounds before it are added to the talk."""
        for left in range(self.max_tool_rounds, -1, -1):
            message = await talk.ask(lambda messages: self.ask(messages, model))
            done = await self.work(message, context, model, last=left == 0)
            if isinstance(done, Act):
                return done
            talk.add(message, done)
        raise AssertionError("the last round always acts")


def count(results: Sequence[ToolResult], context: ToolContext, model: Model) -> None:
    """Add these results to the episode's metrics: all, those that failed, and the failures by kind.

    `tool/used` is 1 for an episode with a call, so its mean is the share of episodes that use tools.
    """
    if results and not context.calls:
        model.count({"tool/used": 1.0})
    context.calls += len(results)
    for result in results:
        model.count({"tool/calls": 1.0})
        if not result.ok:
            model.count({"tool/failed": 1.0, f"tool/{result.kind}": 1.0})


def answer(call: ToolCall, result: ToolResult) -> Message:
    """A tool's result as the message the model reads."""
    return Message("tool", result.content, tool_call_id=call.id, name=call.name)
