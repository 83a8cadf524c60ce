"""Qwen Coder: tags for the function and each parameter."""

from __future__ import annotations

import re

from arborl.chat.formats.json_calls import dumps, unique_pairs
from arborl.chat.formats.tool_parser import ToolCallParser
from arborl.types import ToolCall

SHAPE = "<tool_call>\n<function=TOOL>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>"
FUNCTION = re.compile(r"<function=([^>\n]*)>")
PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)</parameter>", re.DOTALL)
NAME = re.compile(r"[^>\s](?:[^>\n]*[^>\s])?")
END, CLOSE = "</function>", "</parameter>"


class QwenXmlParser(ToolCallParser):
    """`<function=add><parameter=a>1</parameter></function>`, within `<tool_call>` tags.

    Values are text: `1` is read as `"1"`, and the tool's signature converts it. Numbers, lists and objects therefore
    return as JSON text.

    Example:
        QwenXmlParser().parse("<tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>")
        # (ToolCall("call_0", "add", {"a": "1"}),)
    """

    tokens = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>", "<function=")

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        openings = list(FUNCTION.finditer(text))
        limits = [*(following.start() for following in openings[1:]), len(text)]
        for found, limit in zip(openings, limits, strict=False):
            calls.append(_read(f"call_{len(calls)}", found[1].strip(), text[found.end() : limit]))
        if not calls and "<tool_call>" in text:
            calls.append(ToolCall("call_0", "", error=f"there is no function in the tool call. Write {SHAPE}"))
        return tuple(calls)

    def format(self, *calls: ToolCall) -> str:
        return "\n".join(_write(call) for call in calls)


def _read(call_id: str, name: str, body: str) -> ToolCall:
    end = body.find(END)
    if not name:
        return ToolCall(call_id, "", error=f"the function has no name. Write {SHAPE}")
    if end < 0:
        return ToolCall(call_id, name, error=f"the tool call is not closed. Write {SHAPE.replace('TOOL', name)}")
    inside, _, behind = body[:end].rpartition(CLOSE)  # no parameter ends behind the last closing tag
    inside += CLOSE if body[:end] != behind else ""
    left = (PARAMETER.sub("", inside) + behind).strip()
    if left:
        shape = SHAPE.replace("TOOL", name)
        return ToolCall(call_id, name, error=f"there is text outside parameters: {left[:40]!r}. Write {shape}")
    try:
        return ToolCall(call_id, name, unique_pairs([(k.strip(), _value(v)) for k, v in PARAMETER.findall(inside)]))
    except ValueError as error:
        return ToolCall(call_id, name, error=f"{error}. Write {SHAPE.replace('TOOL', name)}")


def _value(text: str) -> str:
    """The value without one line end behind the opening and before the closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


def _write(call: ToolCall) -> str:
    lines = ["<tool_call>", f"<function={_checked(call.name)}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else dumps(value)
        if CLOSE in text or END in text or FUNCTION.search(text):
            raise ValueError(f"argument {key!r} holds a tag of this format, which has no way to escape one")
        lines += [f"<parameter={_checked(key)}>", text, CLOSE]
    return "\n".join([*lines, END, "</tool_call>"])


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not valid in a tag")
    return name
