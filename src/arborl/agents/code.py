"""The code agent: code between tags is run, and what it printed comes back between tags of its own.

Results are messages of the environment's side, so they are never trained on: they were not sampled, and nothing has to
search the text to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from arborl.agents.agent import Model
from arborl.agents.context.policy import Policy
from arborl.agents.rounds import Act, RoundsAgent, count
from arborl.errors import ConfigError
from arborl.tools import TOOLS
from arborl.tools.core.tool import AnyTool
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.core.toolbox import as_tool
from arborl.types import Message, ToolResult

USUAL_ANSWER = ("<answer>", "</answer>")


class CodeAgent(RoundsAgent):
    """Lets the model run code before it answers.

    The first block of a message counts: if it is code, it is run and the model sees what came of it, errors included;
    if it is an answer, or there is no block, the message goes to the environment.

    Example:
        <code>print(6 * 7)</code>                 the model
        <result>\\n42\\n</result>                   the environment's side
        <answer>42</answer>                       the model

    Args:
        tools: the one that runs the code, by its one required argument; the library's `python` by default.
        code_start_tag, code_end_tag: around code. The end tag stops the sampling, unless it is part of the start tag.
        answer_start_tag, answer_end_tag: around the answer; one in other tags than `<answer>` reaches the environment
            in these.
        result_start_tag, result_end_tag: around what the code printed.
        result_role: role of the message that carries a result; `user` for templates that refuse `tool`.
        max_tool_rounds: pieces of code run before one step of the environment.
        context: what is done when the conversation outgrows the window; nothing by default.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        code_start_tag: str = "<code>",
        code_end_tag: str = "</code>",
        answer_start_tag: str = USUAL_ANSWER[0],
        answer_end_tag: str = USUAL_ANSWER[1],
        result_start_tag: str = "<result>",
        result_end_tag: str = "</result>",
        result_role: Literal["tool", "user"] = "tool",
        max_tool_rounds: int = 8,
        context: Policy | None = None,
    ):
        super().__init__(max_tool_rounds, context)
        tags = {"code_start_tag": code_start_tag, "code_end_tag": code_end_tag}
        tags |= {"answer_start_tag": answer_start_tag, "answer_end_tag": answer_end_tag}
        for key, tag in tags.items():
            if not tag:
                raise ValueError(f"{key} is empty: give the text of a tag")
        if code_start_tag == answer_start_tag:
            raise ValueError(f"code and answers both begin with {code_start_tag!r}; give one of them another tag")
        if result_role not in ("tool", "user"):
            raise ValueError(f"result_role={result_role!r}: give tool or user")
        self.code, self.answers = (code_start_tag, code_end_tag), (answer_start_tag, answer_end_tag)
        self.results, self.result_role = (result_start_tag, result_end_tag), result_role
        self.stop = () if code_end_tag in code_start_tag else (code_end_tag,)
        self.tool, self.argument = _runner(tools)
        self.sandboxed = getattr(self.tool, "sandboxed", False)

    async def ask(self, messages: Sequence[Message], model: Model) -> Message:
        return await model.chat(messages, stop=self.stop)

    async def work(self, message: Message, context: ToolContext, model: Model, last: bool) -> Act | list[Message]:
        text = message.content
        code_at, answer_at = text.find(self.code[0]), text.find(self.answers[0])
        if last or code_at < 0 or 0 <= answer_at < code_at:
            return Act(message, self._action(message))
        code = between(text, *self.code)
        if code is None:
            error = f"the code is not closed and was not run. End it with {self.code[1]}"
            result = ToolResult(error, False, "malformed")
        else:
            result = await self.tool.run({self.argument: code.strip("\n")}, context)
        count([result], context, model)
        return [self.shown(result.content)]

    def shown(self, result: str) -> Message:
        """What code printed, as the model reads it."""
        start, end = self.results
        name = self.tool.name if self.result_role == "tool" else None
        return Message(self.result_role, f"{start}\n{result}\n{end}", name=name)

    def _action(self, message: Message) -> Message:
        """The message as the environment and the rewards read it."""
        found = between(message.content, *self.answers)
        if self.answers == USUAL_ANSWER or found is None:
            return message
        return Message("assistant", f"{USUAL_ANSWER[0]}{found}{USUAL_ANSWER[1]}")


def between(text: str, start: str, end: str) -> str | None:
    """What stands between the first `start` and the `end` after it; None where either is missing.

    Example:
        between("so <code>x</code>", "<code>", "</code>")      # 'x'
    """
    _, found, rest = text.partition(start)
    inside, closed, _ = rest.partition(end)
    return inside if found and closed else None


def _runner(tools: Sequence[AnyTool | Callable[..., Any]]) -> tuple[AnyTool, str]:
    """The tool that runs code, and the argument that takes it."""
    if len(tools) > 1:
        raise ConfigError("agent=code runs code with one tool. Write tools=[python], or agent=tool for several.")
    made = as_tool(tools[0] if tools else TOOLS["python"])
    required = made.spec.parameters.get("required", [])
    if len(required) != 1:
        raise ConfigError(f"agent=code cannot run code with {made.name!r}: it needs one required argument, the code.")
    return made, required[0]
