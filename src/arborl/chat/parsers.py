"""Tool calls in what a model wrote. A call that cannot be read is still a call, and its error says what to write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from arborl.types import ToolCall


class Parser(Protocol):
    """One way of writing tool calls. `parse(format(call)) == (call,)`, up to the call's id."""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """Every call in a message, in order, with the ids `call_0`, `call_1`, …"""
        ...

    def format(self, call: ToolCall) -> str:
        """The call as the model would write it."""
        ...


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them between other text.

    Example:
        HermesParser().parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        # (ToolCall("call_0", "add", {"a": 1}),)
    """

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return tuple(_read(f"call_{i}", block) for i, block in enumerate(_blocks(text)))

    def format(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, allow_nan=False)
        # The tag can only stand inside a JSON string, where `\/` is another way to write `/`.
        return f"{OPEN}{body.replace(CLOSE, ESCAPED)}{CLOSE}"


OPEN, CLOSE, ESCAPED = "<tool_call>", "</tool_call>", r"<\/tool_call>"
TAG = re.compile(f"{OPEN}|{CLOSE}")
SHAPE = OPEN + '{"name": "TOOL", "arguments": {"NAME": "VALUE"}}' + CLOSE
UNCLOSED = f"the tool call is not closed. End it with {CLOSE}, like this: {SHAPE}"

Block = Any | ValueError
"""The value of one block's JSON, or why there is none."""


def _blocks(text: str) -> Iterator[Block]:
    """What each block holds, in order.

    JSON decides where a block ends, so a closing tag inside a string does not. Where the JSON is broken, the block
    ends at the next tag.
    """
    at = text.find(OPEN)
    while at >= 0:
        at += len(OPEN)
        value, end = _value(text, at)
        following = TAG.search(text, at if end is None else end)
        if following is None or following.group() == OPEN:
            yield ValueError(UNCLOSED)
        elif end is not None and text[end : following.start()].strip():
            extra = text[end : following.start()].strip()
            yield ValueError(f"there is text after the JSON object: {_short(extra)}. Write one object only: {SHAPE}")
        else:
            yield value
        at = text.find(OPEN, at if end is None else end)


def _value(text: str, at: int) -> tuple[Block, int | None]:
    """The JSON value at `at` and where it ends; or its error, and None."""
    start = next((i for i in range(at, len(text)) if not text[i].isspace()), len(text))
    try:
        value, end = JSON.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except (ValueError, RecursionError) as error:
        return ValueError(f"the tool call is not valid JSON ({_reason(error, start)}). Write {SHAPE}"), None
    return value, end


def _read(call_id: str, block: Block) -> ToolCall:
    """A call from one block's value."""
    if isinstance(block, ValueError):
        return ToolCall(call_id, "", error=str(block))
    if not isinstance(block, dict):
        return ToolCall(call_id, "", error=f"the tool call is {_kind(block)}, not an object. Write {SHAPE}")
    name = block.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", error=f'the tool call has no "name". Write {SHAPE}')
    arguments = block.get("arguments", {})
    if isinstance(arguments, str):
        inner, end = _value(arguments, 0)
        if end is not None and isinstance(inner, dict) and not arguments[end:].strip():
            arguments = inner
    if not isinstance(arguments, dict):
        shape = SHAPE.replace("TOOL", name)
        return ToolCall(call_id, name, error=f'"arguments" is {_kind(arguments)}, not an object. Write {shape}')
    return ToolCall(call_id, name, arguments)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{_short(digits)} is too large a number")
    return value


JSON = json.JSONDecoder(parse_constant=_constant, parse_float=_finite)
"""Strict: what it reads can be written as JSON again."""


def _reason(error: Exception, start: int) -> str:
    """Positions are told within the call, as its writer sees it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}"
    if isinstance(error, UnicodeError):
        return "half of a surrogate pair"
    return "too deeply nested" if isinstance(error, RecursionError) else str(error)


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _short(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[:most] + "…")
