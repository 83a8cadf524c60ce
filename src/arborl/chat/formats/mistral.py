"""Mistral: a control token and a JSON list; newer models write a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from arborl.chat.formats.json_calls import call_with_arguments, dumps, parse_json_at, read_call
from arborl.chat.formats.tool_parser import ToolCallParser
from arborl.types import ToolCall

TOKEN = "[TOOL_CALLS]"
SHAPE = TOKEN + ' [{"name": "TOOL", "arguments": {"NAME": "VALUE"}}]'
NAMED = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`; `[TOOL_CALLS]name[ARGS]{…}` is read too.

    Ids have nine letters and digits (`call00000`): the templates of these models refuse others.

    Example:
        MistralParser().parse('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]')
        # (ToolCall("call00000", "add", {"a": 1}),)
    """

    tokens = (TOKEN, "[CALL_ID]", "[ARGS]")
    opens = (TOKEN,)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        read: dict[str, ToolCall] = {}
        for index, call in enumerate(_calls(text)):
            taken = call.id in read or not ID.fullmatch(call.id)
            name = f"call{index:05d}" if taken else call.id
            read[name] = ToolCall(name, call.name, call.arguments, call.error)
        return tuple(read.values())

    def format(self, *calls: ToolCall) -> str:
        if not calls:
            return ""
        return f"{TOKEN} {dumps([{'name': call.name, 'arguments': call.arguments} for call in calls])}"


def _calls(text: str) -> Iterator[ToolCall]:
    """The calls; each token opens a list, an object, or a name with arguments.

    JSON decides where a list ends, so the token inside a string opens nothing.
    """
    at = text.find(TOKEN)
    while at >= 0:
        at += len(TOKEN)
        named = NAMED.match(text, at)
        value, end = parse_json_at(text, named.end() if named else at, SHAPE)
        if isinstance(value, ValueError):
            yield ToolCall("", "", error=str(value))
        elif named:
            yield call_with_arguments(named[2] or "", named[1], value, "arguments", SHAPE)
        elif value == []:
            yield ToolCall("", "", error=f"the list of tool calls is empty. Write {SHAPE}")
        else:
            for one in value if isinstance(value, list) else [value]:
                yield read_call(_valid_id(one), one, SHAPE)
        at = text.find(TOKEN, at if end is None else end)


def _valid_id(one: Any) -> str:
    call_id = one.get("id") if isinstance(one, dict) else None
    return call_id if isinstance(call_id, str) and ID.fullmatch(call_id) else ""
