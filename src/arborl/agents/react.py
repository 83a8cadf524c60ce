"""ReAct: thoughts, actions and observations as plain text, for models without a tool-call format of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from arborl.agents.agent import Model
from arborl.agents.context.policy import Policy
from arborl.agents.rounds import Act, RoundsAgent, count
from arborl.chat.formats.react_format import ReactParser, final_answer
from arborl.tools.injection import Context
from arborl.tools.tool import AnyTool
from arborl.tools.toolbox import Toolbox
from arborl.types import Message, ToolResult, ToolSpec

STOP = "\nObservation:"
NEITHER = "write either an Action with its Action Input, or a Final Answer"


class ReactAgent(RoundsAgent):
    """Describes the tools in the system message and reads Thought / Action / Action Input / Final Answer.

    Sampling stops where the model would go on to imagine an observation. What follows `Final Answer:` is what the
    environment is told.

    Args:
        tools: what it may call.
        max_tool_rounds: messages that are answered before one step of the environment; the message after that goes to
            the environment.
        max_calls: actions of one message that are run; those beyond are answered with that.
        result_role: role of the message that carries observations; `tool` for models that forget their thoughts
            whenever a user speaks.
        context: what is done when the conversation outgrows the window; nothing by default.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        max_tool_rounds: int = 8,
        max_calls: int = 16,
        result_role: Literal["tool", "user"] = "user",
        context: Policy | None = None,
    ):
        super().__init__(max_tool_rounds, context)
        if result_role not in ("tool", "user"):
            raise ValueError(f"result_role={result_role!r}: give tool or user")
        self.toolbox, self.result_role = Toolbox(tools, max_calls), result_role
        self.parser, self.offered = ReactParser(), len(self.toolbox.specs)

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        told = instructions(self.toolbox.specs)
        if messages and messages[0].role == "system":
            return [Message("system", f"{messages[0].content}\n\n{told}"), *messages[1:]]
        return [Message("system", told), *messages]

    async def ask(self, messages: Sequence[Message], model: Model) -> Message:
        return await model.chat(messages, stop=(STOP,))

    async def work(self, message: Message, context: Context, model: Model, last: bool) -> Act | list[Message]:
        answer = final_answer(message.content)
        if answer is not None:
            return Act(message, Message("assistant", answer))
        if last:
            return Act(message, message)
        calls = self.parser.parse(message.content)
        results = await self.toolbox.run(calls, context) if calls else [ToolResult(NEITHER, False, "malformed")]
        count(results, context, model)
        for call, result in zip(calls, results, strict=False):
            if self.toolbox.ends(call, result):
                return Act(message, Message("assistant", result.content), ends=True)
        return [Message(self.result_role, "\n".join(f"Observation: {result.content}" for result in results))]


def instructions(tools: Sequence[ToolSpec]) -> str:
    """What the model is told about the form and the tools."""
    described = "\n".join(f"{one.name}: {one.description} Input: {json.dumps(one.parameters)}" for one in tools)
    return (
        "Work in steps. In each step write\n"
        "Thought: what to do next\n"
        f"Action: one of {', '.join(one.name for one in tools) or 'no tools'}\n"
        "Action Input: its input as a JSON object\n"
        "and you are told the Observation. When you know the answer, write\n"
        "Thought: I know the answer\n"
        "Final Answer: the answer\n\n"
        f"Tools:\n{described or 'none'}"
    )
