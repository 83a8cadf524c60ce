"""Llama 3: bare JSON objects, with `parameters`."""

from __future__ import annotations

import re

from arborl.chat.formats.json_calls import ParsedBlock, dumps, parse_json_at, read_call
from arborl.chat.formats.tool_parser import ToolCallParser
from arborl.types import ToolCall

TAG = "<|python_tag|>"
START = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')  # start of a call; other JSON is part of an answer
SHAPE = '{"name": "TOOL", "parameters": {"NAME": "VALUE"}}'


class Llama3Parser(ToolCallParser):
    """`{"name": …, "parameters": {…}}`, several with `; ` between them.

    `<|python_tag|>` may precede the first; a call must then follow.

    Example:
        Llama3Parser().parse('{"name": "add", "parameters": {"a": 1}}')
        # (ToolCall("call_0", "add", {"a": 1}),)
    """

    tokens = (TAG,)
    opens = (TAG, "{")

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        blocks: list[ParsedBlock] = []
        at = 0
        while found := START.search(text, at):
            value, end = parse_json_at(text, found.start(), SHAPE)
            blocks.append(value)
            at = found.end() if end is None else end
        tag = text.find(TAG)
        if not blocks and tag >= 0:
            blocks.append(ValueError(f"there is no call after {TAG}. Write {SHAPE}"))
        return tuple(_read(f"call_{i}", block) for i, block in enumerate(blocks))

    def format(self, *calls: ToolCall) -> str:
        return "; ".join(dumps({"name": call.name, "parameters": call.arguments}) for call in calls)


def _read(call_id: str, block: ParsedBlock) -> ToolCall:
    if isinstance(block, dict) and block.get("type") == "function":
        inner = block.get("function")  # the name or the whole call
        block = inner if isinstance(inner, dict) else {**block, "name": block.get("name", inner)}
    return read_call(call_id, block, SHAPE, ("parameters", "arguments"))
