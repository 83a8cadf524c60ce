"""Agents with tools: rounds of tool calls, then one message to the environment.

`ToolAgent` uses the model's tool-call format, `CodeAgent` runs code between tags, `ReactAgent` reads Thought / Action /
Observation text. Tool results are messages that were not sampled, so they are never trained on.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arborl.agents.agent_interface import Agent, Model
from arborl.agents.context.managed_conversation import ContextPolicy, ManagedConversation
from arborl.chat.formats.text_formats import ReactParser, final_answer
from arborl.envs.env import Env
from arborl.errors import ConfigError
from arborl.tools import TOOLS
from arborl.tools.core.tool import AnyTool
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.core.toolbox import Toolbox, as_tool
from arborl.types import Message, Task, ToolResult, ToolSpec

FAILURE_KINDS = ("unknown_tool", "malformed", "arguments", "exception", "timeout")
"""How a tool call can fail; a tool behind HTTP adds further kinds."""
ZERO_COUNTS = dict.fromkeys(
    ("tool/used", "tool/calls", "tool/failed", *(f"tool/{kind}" for kind in FAILURE_KINDS)), 0.0
)
OBSERVATION_STOP = "\nObservation:"
REACT_ERROR = "write either an Action with its Action Input, or a Final Answer"
ANSWER_TAGS = ("<answer>", "</answer>")


@dataclass(frozen=True, slots=True)
class AgentAction:
    """The message to the environment at the end of the rounds."""

    message: Message
    action: Message
    is_final: bool = False  # the episode ends after this action


ProcessResult = AgentAction | list[Message]


class ToolLoopAgent(Agent):
    """Base class: samples messages and runs tools until a message goes to the environment."""

    num_tools = 1
    specs: tuple[ToolSpec, ...] = ()  # tools that the chat template describes
    context: ContextPolicy | None = None

    def __init__(self, max_tool_rounds: int = 8, context: ContextPolicy | None = None):
        self.context = context
        if max_tool_rounds < 0:
            raise ValueError(f"max_tool_rounds={max_tool_rounds}: give 0 or more")
        self.max_tool_rounds = max_tool_rounds

    @abstractmethod
    async def sample(self, messages: Sequence[Message], model: Model) -> Message:
        """The model's next message."""

    @abstractmethod
    async def process(self, message: Message, context: ToolContext, model: Model, last: bool) -> ProcessResult:
        """Tool results that answer a message, or an action. In the last round always an action."""

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages)

    async def run(self, task: Task, env: Env, model: Model) -> None:
        model.count({"tool/offered": float(self.num_tools), **ZERO_COUNTS})
        async with ToolContext(task, getattr(model, "tokenizer", None)) as context:
            observation = await env.reset(task, task.seed)
            opening = self.opening(observation.messages)
            with ManagedConversation(model, opening, self.context, self.specs) as conversation:
                while True:
                    action = await self._next_action(conversation, context, model)
                    step = await env.step(action.action)
                    if step.over or action.is_final:
                        return
                    conversation.add(action.message)
                    conversation.observe(step.observation.messages)

    async def _next_action(self, conversation: ManagedConversation, context: ToolContext, model: Model) -> AgentAction:
        for left in range(self.max_tool_rounds, -1, -1):
            message = await conversation.sample(lambda messages: self.sample(messages, model))
            result = await self.process(message, context, model, last=left == 0)
            if isinstance(result, AgentAction):
                return result
            conversation.add(message, result)
        raise AssertionError("the last round always returns an action")


def count_results(results: Sequence[ToolResult], context: ToolContext, model: Model) -> None:
    """Add tool results to the episode's metrics: calls, failures, failures by kind. `tool/used` is 1 for an episode
    with a call, so its mean is the share of episodes that use tools."""
    if results and not context.calls:
        model.count({"tool/used": 1.0})
    context.calls += len(results)
    for result in results:
        model.count({"tool/calls": 1.0})
        if not result.ok:
            model.count({"tool/failed": 1.0, f"tool/{result.kind}": 1.0})


class ToolAgent(ToolLoopAgent):
    """Lets the model call tools, in its own format, before it acts. The calls of one message run concurrently.

    A successful call of a terminal tool ends the episode; the tool's result is the answer.

    Args:
        tools: that the model may call.
        max_tool_rounds: messages with calls before one step of the environment. The message after that goes to the
            environment, unless it calls a terminal tool.
        max_calls: calls of one message that are run; further calls get an error.
        context: policy for a conversation that exceeds the context window; none by default.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        max_tool_rounds: int = 8,
        max_calls: int = 16,
        context: ContextPolicy | None = None,
    ):
        super().__init__(max_tool_rounds, context)
        self.toolbox = Toolbox(tools, max_calls)
        self.specs, self.num_tools = tuple(self.toolbox.specs), len(self.toolbox.specs)

    async def sample(self, messages: Sequence[Message], model: Model) -> Message:
        return await model.chat(messages, self.toolbox.specs)

    async def process(self, message: Message, context: ToolContext, model: Model, last: bool) -> ProcessResult:
        calls = message.tool_calls
        if last:
            calls = tuple(call for call in calls if self.toolbox.is_terminal(call))
        if not calls:
            return AgentAction(message, message)
        results = await self.toolbox.run(calls, context)
        count_results(results, context, model)
        for call, result in zip(calls, results, strict=True):
            if self.toolbox.ends(call, result):
                return AgentAction(message, Message("assistant", result.content), is_final=True)
        if last:
            return AgentAction(message, message)
        return [
            Message("tool", result.content, tool_call_id=call.id, name=call.name)
            for call, result in zip(calls, results, strict=True)
        ]


class ReactAgent(ToolLoopAgent):
    """ReAct: tools are described in the system message; Thought / Action / Action Input / Final Answer are text.

    For models without a tool-call format. Sampling stops before the model invents an observation. The text after
    `Final Answer:` goes to the environment.

    Args:
        tools: that the model may call.
        max_tool_rounds: messages that are answered before one step of the environment; the message after that goes to
            the environment.
        max_calls: actions of one message that are run; further actions get an error.
        result_role: role of the message with observations; `tool` for models whose template drops thoughts before a
            user message.
        context: policy for a conversation that exceeds the context window; none by default.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        max_tool_rounds: int = 8,
        max_calls: int = 16,
        result_role: Literal["tool", "user"] = "user",
        context: ContextPolicy | None = None,
    ):
        super().__init__(max_tool_rounds, context)
        if result_role not in ("tool", "user"):
            raise ValueError(f"result_role={result_role!r}: give tool or user")
        self.toolbox, self.result_role = Toolbox(tools, max_calls), result_role
        self.parser, self.num_tools = ReactParser(), len(self.toolbox.specs)

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        text = react_instructions(self.toolbox.specs)
        if messages and messages[0].role == "system":
            return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
        return [Message("system", text), *messages]

    async def sample(self, messages: Sequence[Message], model: Model) -> Message:
        return await model.chat(messages, stop=(OBSERVATION_STOP,))

    async def process(self, message: Message, context: ToolContext, model: Model, last: bool) -> ProcessResult:
        answer = final_answer(message.content)
        if answer is not None:
            return AgentAction(message, Message("assistant", answer))
        if last:
            return AgentAction(message, message)
        calls = self.parser.parse(message.content)
        results = await self.toolbox.run(calls, context) if calls else [ToolResult(REACT_ERROR, False, "malformed")]
        count_results(results, context, model)
        for call, result in zip(calls, results, strict=False):
            if self.toolbox.ends(call, result):
                return AgentAction(message, Message("assistant", result.content), is_final=True)
        return [Message(self.result_role, "\n".join(f"Observation: {result.content}" for result in results))]


def react_instructions(tools: Sequence[ToolSpec]) -> str:
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


class CodeAgent(ToolLoopAgent):
    """Runs code between tags before it answers.

    The first block of a message counts. Code is run, and its output, errors included, is the next message. An answer,
    or a message without a block, goes to the environment.

    Example:
        <code>print(6 * 7)</code>                 the model
        <result>\\n42\\n</result>                   the tool
        <answer>42</answer>                       the model

    Args:
        tools: the tool that runs the code, with one required argument; the library's `python` by default.
        code_start_tag, code_end_tag: around code. The end tag stops the sampling, unless it is part of the start tag.
        answer_start_tag, answer_end_tag: around the answer; for the environment they are replaced by `<answer>`.
        result_start_tag, result_end_tag: around the output of the code.
        result_role: role of the message with the output; `user` for templates without `tool`.
        max_tool_rounds: pieces of code that are run before one step of the environment.
        context: policy for a conversation that exceeds the context window; none by default.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        code_start_tag: str = "<code>",
        code_end_tag: str = "</code>",
        answer_start_tag: str = ANSWER_TAGS[0],
        answer_end_tag: str = ANSWER_TAGS[1],
        result_start_tag: str = "<result>",
        result_end_tag: str = "</result>",
        result_role: Literal["tool", "user"] = "tool",
        max_tool_rounds: int = 8,
        context: ContextPolicy | None = None,
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
        self.code_tags, self.answer_tags = (code_start_tag, code_end_tag), (answer_start_tag, answer_end_tag)
        self.result_tags, self.result_role = (result_start_tag, result_end_tag), result_role
        self.stop = () if code_end_tag in code_start_tag else (code_end_tag,)
        self.tool, self.argument = _code_tool(tools)
        self.sandboxed = getattr(self.tool, "sandboxed", False)

    async def sample(self, messages: Sequence[Message], model: Model) -> Message:
        return await model.chat(messages, stop=self.stop)

    async def process(self, message: Message, context: ToolContext, model: Model, last: bool) -> ProcessResult:
        text = message.content
        code_at, answer_at = text.find(self.code_tags[0]), text.find(self.answer_tags[0])
        if last or code_at < 0 or 0 <= answer_at < code_at:
            return AgentAction(message, self._action(message))
        code = text_between(text, *self.code_tags)
        if code is None:
            error = f"the code is not closed and was not run. End it with {self.code_tags[1]}"
            result = ToolResult(error, False, "malformed")
        else:
            result = await self.tool.run({self.argument: code.strip("\n")}, context)
        count_results([result], context, model)
        return [self.shown(result.content)]

    def shown(self, result: str) -> Message:
        start, end = self.result_tags
        name = self.tool.name if self.result_role == "tool" else None
        return Message(self.result_role, f"{start}\n{result}\n{end}", name=name)

    def _action(self, message: Message) -> Message:
        answer = text_between(message.content, *self.answer_tags)
        if self.answer_tags == ANSWER_TAGS or answer is None:
            return message
        return Message("assistant", f"{ANSWER_TAGS[0]}{answer}{ANSWER_TAGS[1]}")


def text_between(text: str, start: str, end: str) -> str | None:
    """The text between the first `start` and the next `end`; None if either is missing."""
    _, has_start, rest = text.partition(start)
    inside, has_end, _ = rest.partition(end)
    return inside if has_start and has_end else None


def _code_tool(tools: Sequence[AnyTool | Callable[..., Any]]) -> tuple[AnyTool, str]:
    if len(tools) > 1:
        raise ConfigError("agent=code runs code with one tool. Write tools=[python], or agent=tool for several.")
    tool = as_tool(tools[0] if tools else TOOLS["python"])
    required = tool.spec.parameters.get("required", [])
    if len(required) != 1:
        raise ConfigError(f"agent=code cannot run code with {tool.name!r}: it needs one required argument, the code.")
    return tool, required[0]
