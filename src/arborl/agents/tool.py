"""The loop with tools: calls are answered by the toolbox, everything else goes to the environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arborl.agents.agent import Model
from arborl.agents.context.policy import Policy
from arborl.agents.rounds import Act, RoundsAgent, answer, count
from arborl.tools.core.tool import AnyTool
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.core.toolbox import Toolbox
from arborl.types import Message


class ToolAgent(RoundsAgent):
    """Lets the model call tools, in its own format, before it acts. The calls of one message run at once.

    A call of a terminal tool that works ends the episode, and what the tool returned is the answer.

    Args:
        tools: what it may call.
        max_tool_rounds: messages with calls that are answered before one step of the environment; the message after
            that goes to the environment as it is, unless it calls a terminal tool.
        max_calls: calls of one message that are run; those beyond are answered with that.
        context: what is done when the conversation outgrows the window; nothing by default.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        max_tool_rounds: int = 8,
        max_calls: int = 16,
        context: Policy | None = None,
    ):
        super().__init__(max_tool_rounds, context)
        self.toolbox = Toolbox(tools, max_calls)
        self.specs, self.offered = tuple(self.toolbox.specs), len(self.toolbox.specs)

    async def ask(self, messages: Sequence[Message], model: Model) -> Message:
        return await model.chat(messages, self.toolbox.specs)

    async def work(self, message: Message, context: ToolContext, model: Model, last: bool) -> Act | list[Message]:
        calls = message.tool_calls
        if last:
            calls = tuple(call for call in calls if self.toolbox.is_terminal(call))
        if not calls:
            return Act(message, message)
        results = await self.toolbox.run(calls, context)
        count(results, context, model)
        for call, result in zip(calls, results, strict=True):
            if self.toolbox.ends(call, result):
                return Act(message, Message("assistant", result.content), ends=True)
        if last:
            return Act(message, message)
        return list(map(answer, calls, results))
