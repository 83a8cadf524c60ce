"""Formats with JSON: Hermes and Qwen (between tags), Llama 3 (bare objects), Mistral (behind a control token).

JSON is read strictly, and errors say what to write. JSON decides where a call ends, so a tag inside a string does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from arborl.chat.formats import ToolCallParser, numbered
from arborl.types import ToolCall

ParsedBlock = Any | ValueError  # A JSON value, or the error of parsing it


def parse_json_at(text: str, at: int, shape: str) -> tuple[ParsedBlock, int | None]:
    """The JSON value behind white space at `at` and its end; or the error and None."""
    start = next((i for i in range(at, len(text)) if not text[i].isspace()), len(text))
    try:
        value, end = JSON.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not text
    except (ValueError, RecursionError) as error:
        return ValueError(f"the tool call is not valid JSON ({_json_error(error, start)}). Write {shape}"), None
    return value, end


def read_call(block: ParsedBlock, shape: str, keys: tuple[str, ...] = ("arguments",), call_id: str = "") -> ToolCall:
    """A call from the value of one block. `shape`: a valid call, for errors. `keys`: names of the arguments."""
    if isinstance(block, ValueError):
        return ToolCall(call_id, "", error=str(block))
    if not isinstance(block, dict):
        return ToolCall(call_id, "", error=f"the tool call is {_type_name(block)}, not an object. Write {shape}")
    name = block.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", error=f'the tool call has no "name". Write {shape}')
    key = next((key for key in keys if key in block), keys[0])
    return call_with_arguments(call_id, name, block.get(key, {}), key, shape)


def call_with_arguments(call_id: str, name: str, arguments: Any, key: str, shape: str) -> ToolCall:
    """A call whose arguments are an object or a text with one."""
    if isinstance(arguments, str):
        inner, end = parse_json_at(arguments, 0, shape)
        if end is not None and isinstance(inner, dict) and not arguments[end:].strip():
            arguments = inner
    if not isinstance(arguments, dict):
        example = shape.replace("TOOL", name)
        return ToolCall(call_id, name, error=f'"{key}" is {_type_name(arguments)}, not an object. Write {example}')
    return ToolCall(call_id, name, arguments)


def dumps(value: Any) -> str:
    """JSON that `parse_json_at` reads back unchanged."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from key-value pairs; ValueError for a repeated key."""
    read: dict[str, Any] = {}
    for key, value in pairs:
        if key in read:
            raise ValueError(f"{shorten(key)} is given twice")
        read[key] = value
    return read


def shorten(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[:most] + "…")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{shorten(digits)} is too large a number")
    return value


JSON = json.JSONDecoder(parse_constant=_constant, parse_float=_finite, object_pairs_hook=unique_pairs)
"""Strict decoder: its values can be written as JSON again."""


def _json_error(error: Exception, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}"
    if isinstance(error, UnicodeError):
        return "half of a surrogate pair"
    return "too deeply nested" if isinstance(error, RecursionError) else str(error)


def _type_name(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them between other text."""

    tokens = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>",)
    shape = '<tool_call>{"name": "TOOL", "arguments": {"NAME": "VALUE"}}</tool_call>'

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return numbered(read_call(block, self.shape) for block in self._blocks(text))

    def format(self, *calls: ToolCall) -> str:
        opening, closing = self.tokens
        bodies = (dumps({"name": call.name, "arguments": call.arguments}) for call in calls)
        escaped = closing.replace("/", "\\/")  # inside a JSON string, the only place of a tag, `\/` also means `/`
        return "\n".join(f"{opening}{body.replace(closing, escaped)}{closing}" for body in bodies)

    def _blocks(self, text: str) -> Iterator[ParsedBlock]:
        """What each block holds, in order. Where the JSON is broken, the block ends at the next tag."""
        opening, closing = self.tokens
        at = text.find(opening)
        while at >= 0:
            at += len(opening)
            value, end = parse_json_at(text, at, self.shape)
            following = re.compile(f"{opening}|{closing}").search(text, at if end is None else end)
            extra = "" if end is None or following is None else text[end : following.start()].strip()
            if following is None or following.group() == opening:
                yield ValueError(f"the tool call is not closed. End it with {closing}, like this: {self.shape}")
            elif extra:
                why = f"there is text after the JSON object: {shorten(extra)}"
                yield ValueError(f"{why}. Write one object only: {self.shape}")
            else:
                yield value
            at = text.find(opening, at if end is None else end)


class Llama3Parser(ToolCallParser):
    """`{"name": …, "parameters": {…}}`, several with `; ` between them. `<|python_tag|>` may precede the first; a call
    must then follow."""

    tokens = ("<|python_tag|>",)
    opens = ("<|python_tag|>", "{")
    shape = '{"name": "TOOL", "parameters": {"NAME": "VALUE"}}'
    start = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
    """Start of a call; other JSON is part of an answer."""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        blocks: list[ParsedBlock] = []
        at = 0
        while found := self.start.search(text, at):
            value, end = parse_json_at(text, found.start(), self.shape)
            blocks.append(value)
            at = found.end() if end is None else end
        if not blocks and self.tokens[0] in text:
            blocks.append(ValueError(f"there is no call after {self.tokens[0]}. Write {self.shape}"))
        return numbered(map(self._read, blocks))

    def format(self, *calls: ToolCall) -> str:
        return "; ".join(dumps({"name": call.name, "parameters": call.arguments}) for call in calls)

    def _read(self, block: ParsedBlock) -> ToolCall:
        if isinstance(block, dict) and block.get("type") == "function":
            inner = block.get("function")  # the name or the whole call
            block = inner if isinstance(inner, dict) else {**block, "name": block.get("name", inner)}
        return read_call(block, self.shape, ("parameters", "arguments"))


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`; `[TOOL_CALLS]name[ARGS]{…}` is read too. Ids have nine letters
    and digits (`call00000`): the templates of these models refuse others."""

    tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    opens = ("[TOOL_CALLS]",)
    shape = '[TOOL_CALLS] [{"name": "TOOL", "arguments": {"NAME": "VALUE"}}]'
    named = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        read: dict[str, ToolCall] = {}
        for index, call in enumerate(self._calls(text)):
            is_valid = re.fullmatch(r"[A-Za-z0-9]{9}", call.id) and call.id not in read
            name = call.id if is_valid else f"call{index:05d}"
            read[name] = ToolCall(name, call.name, call.arguments, call.error)
        return tuple(read.values())

    def format(self, *calls: ToolCall) -> str:
        if not calls:
            return ""
        return f"{self.tokens[0]} {dumps([{'name': call.name, 'arguments': call.arguments} for call in calls])}"

    def _calls(self, text: str) -> Iterator[ToolCall]:
        """The calls; each token opens a list, an object, or a name with arguments."""
        token, shape = self.tokens[0], self.shape
        at = text.find(token)
        while at >= 0:
            at += len(token)
            named = self.named.match(text, at)
            value, end = parse_json_at(text, named.end() if named else at, shape)
            if isinstance(value, ValueError):
                yield read_call(value, shape)
            elif named:
                yield call_with_arguments(named[2] or "", named[1], value, "arguments", shape)
            elif value == []:
                yield ToolCall("", "", error=f"the list of tool calls is empty. Write {shape}")
            else:
                for one in value if isinstance(value, list) else [value]:
                    call_id = one.get("id") if isinstance(one, dict) else None
                    yield read_call(one, shape, call_id=call_id if isinstance(call_id, str) else "")
            at = text.find(token, at if end is None else end)
