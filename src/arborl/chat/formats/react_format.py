"""ReAct: Thought, Action and Action Input, each on a line of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from arborl.chat.formats.json_calls import call_with_arguments, dumps, parse_json_at, shorten
from arborl.chat.formats.tool_parser import ToolCallParser
from arborl.types import ToolCall

SHAPE = 'Action: TOOL\nAction Input: {"NAME": "VALUE"}'
LINE = re.compile(r"^[ \t]*(Action Input|Action|Observation|Final Answer)[ \t]*:[ \t]*", re.MULTILINE | re.IGNORECASE)
NAME = re.compile(r"\S(?:[^\n]*\S)?")


class ReactParser(ToolCallParser):
    """`Action: add` and, below it, `Action Input: {"a": 1}`.

    Text behind a line `Observation:` is ignored: the environment writes observations, so the model invented it.
    `Final Answer:` ends the calls too; `final_answer` reads it.

    Example:
        ReactParser().parse('Thought: add them.\\nAction: add\\nAction Input: {"a": 1}')
        # (ToolCall("call_0", "add", {"a": 1}),)
    """

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(f"call_{i}", call.name, call.arguments, call.error) for i, call in enumerate(_calls(text))
        )

    def format(self, *calls: ToolCall) -> str:
        return "\n".join(map(_write, calls))


def final_answer(text: str) -> str | None:
    """Text behind `Final Answer:`, unless an action or an observation precedes it.

    Example:
        final_answer("Thought: I know.\\nFinal Answer: 42")      # '42'
    """
    found = LINE.search(text)
    if found is None or _word(found) != "final answer":
        return None
    after = re.compile(r"^[ \t]*Observation[ \t]*:", re.MULTILINE | re.IGNORECASE).search(text, found.end())
    return text[found.end() : after.start() if after else len(text)].strip()


def _calls(text: str) -> Iterator[ToolCall]:
    at = 0
    while (found := LINE.search(text, at)) and _word(found) in ("action", "action input"):
        if _word(found) == "action input":
            yield ToolCall("", "", error=f"there is an input but no action before it. Write {SHAPE}")
            at = found.end()
            continue
        ends = text.find("\n", found.end())
        name = text[found.end() : ends if ends >= 0 else len(text)].strip()
        following = LINE.search(text, max(ends, found.end()))
        if not name:
            yield ToolCall("", "", error=f"the action has no name. Write {SHAPE}")
            at = following.end() if following and _word(following) == "action input" else found.end()
        elif following is None or _word(following) != "action input":
            shape = SHAPE.replace("TOOL", name)
            yield ToolCall("", name, error=f"the action has no input. Write {shape}")
            at = max(ends, found.end())
        else:
            call, at = _with_input(name, text, following.end())
            yield call


def _with_input(name: str, text: str, at: int) -> tuple[ToolCall, int]:
    """The call and the index behind it. JSON decides where its input ends."""
    shape = SHAPE.replace("TOOL", name)
    fence = re.compile(r"\s*```(?:json)?\s*").match(text, at)
    value, end = parse_json_at(text, fence.end() if fence else at, shape)
    if isinstance(value, ValueError):
        return ToolCall("", name, error=str(value)), at
    assert end is not None
    line_end = text.find("\n", end)
    extra = text[end : line_end if line_end >= 0 else len(text)].strip().strip("`")
    if extra:
        return ToolCall("", name, error=f"there is text after the input: {shorten(extra)}. Write {shape}"), end
    return call_with_arguments("", name, value, "Action Input", shape), end


def _word(found: re.Match[str]) -> str:
    return found[1].lower()


def _write(call: ToolCall) -> str:
    if not NAME.fullmatch(call.name) or call.name != call.name.strip():
        raise ValueError(f"{call.name!r} is not valid on a line")
    return f"Action: {call.name}\nAction Input: {dumps(call.arguments)}"
