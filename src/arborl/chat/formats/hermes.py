"""Hermes and Qwen: JSON between tags."""

from __future__ import annotations

import re
from collections.abc import Iterator

from arborl.chat.formats.json_calls import ParsedBlock, dumps, parse_json_at, read_call, shorten
from arborl.chat.formats.tool_parser import ToolCallParser
from arborl.types import ToolCall

OPEN, CLOSE, ESCAPED = "<tool_call>", "</tool_call>", r"<\/tool_call>"
TAG = re.compile(f"{OPEN}|{CLOSE}")
SHAPE = OPEN + '{"name": "TOOL", "arguments": {"NAME": "VALUE"}}' + CLOSE
UNCLOSED = f"the tool call is not closed. End it with {CLOSE}, like this: {SHAPE}"


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them between other text.

    Example:
        HermesParser().parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        # (ToolCall("call_0", "add", {"a": 1}),)
    """

    tokens = (OPEN, CLOSE)
    opens = (OPEN,)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return tuple(read_call(f"call_{i}", block, SHAPE) for i, block in enumerate(_blocks(text)))

    def format(self, *calls: ToolCall) -> str:
        bodies = (dumps({"name": call.name, "arguments": call.arguments}) for call in calls)
        # The tag can only stand inside a JSON string, where `\/` is another way to write `/`.
        return "\n".join(f"{OPEN}{body.replace(CLOSE, ESCAPED)}{CLOSE}" for body in bodies)


def _blocks(text: str) -> Iterator[ParsedBlock]:
    """What each block holds, in order.

    JSON decides where a block ends, so a closing tag inside a string does not. Where the JSON is broken, the block
    ends at the next tag.
    """
    at = text.find(OPEN)
    while at >= 0:
        at += len(OPEN)
        value, end = parse_json_at(text, at, SHAPE)
        following = TAG.search(text, at if end is None else end)
        if following is None or following.group() == OPEN:
            yield ValueError(UNCLOSED)
        elif end is not None and text[end : following.start()].strip():
            extra = text[end : following.start()].strip()
            yield ValueError(f"there is text after the JSON object: {shorten(extra)}. Write one object only: {SHAPE}")
        else:
            yield value
        at = text.find(OPEN, at if end is None else end)
