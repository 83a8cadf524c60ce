"""Llama 3: bare JSON objects, with `parameters`."""

from __future__ import annotations

import re

from arborl.chat.formats.reading import Block, dumps, read_call, value_at
from arborl.types import ToolCall

TAG = "<|python_tag|>"
START = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
"""Where a call begins: prose does not look like this, and other JSON is an answer."""
SHAPE = '{"name": "TOOL", "parameters": {"NAME": "VALUE"}}'


class Llama3Parser:
    """`{"name": …, "parameters": {…}}`, several with `; ` between them.

    `<|python_tag|>` may stand before the first, and then what follows must be a call.

    Example:
        Llama3Parser().parse('{"name": "add", "parameters": {"a": 1}}')
        # (ToolCall("call_0", "add", {"a": 1}),)
    """

    tokens = (TAG,)
    opens = (TAG, "{")

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        blocks: list[Block] = []
        at = 0
        while found := START.search(text, at):
            value, end = value_at(text, found.start(), SHAPE)
            blocks.append(value)
            at = found.end() if end is None else end
        tag = text.find(TAG)
        if not blocks and tag >= 0:
            blocks.append(ValueError(f"there is no call after {TAG}. Write {SHAPE}"))
        return tuple(_read(f"call_{i}", block) for i, block in enumerate(blocks))

    def format(self, *calls: ToolCall) -> str:
        return "; ".join(dumps({"name": call.name, "parameters": call.arguments}) for call in calls)


def _read(call_id: str, block: Block) -> ToolCall:
    if isinstance(block, dict) and block.get("type") == "function":
        inner = block.get("function")  # some write the name there, some the whole call
        block = inner if isinstance(inner, dict) else {**block, "name": block.get("name", inner)}
    return read_call(call_id, block, SHAPE, ("parameters", "arguments"))
