"""Strict JSON from model output, with readable errors."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from arborl.types import ToolCall

ParsedBlock = Any | ValueError  # A JSON value, or the error of parsing it


def parse_json_at(text: str, at: int, shape: str) -> tuple[ParsedBlock, int | None]:
    """The JSON value behind white space at `at` and its end; or the error and None."""
    start = skip_space(text, at)
    try:
        value, end = JSON.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not text
    except (ValueError, RecursionError) as error:
        return ValueError(f"the tool call is not valid JSON ({json_error(error, start)}). Write {shape}"), None
    return value, end


def read_call(call_id: str, block: ParsedBlock, shape: str, keys: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """A call from the value of one block.

    Args:
        call_id: the id it gets.
        block: the value, or its error.
        shape: a well-formed call, for error messages.
        keys: accepted names of the arguments; the first is the usual one.
    """
    if isinstance(block, ValueError):
        return ToolCall(call_id, "", error=str(block))
    if not isinstance(block, dict):
        return ToolCall(call_id, "", error=f"the tool call is {type_name(block)}, not an object. Write {shape}")
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
        return ToolCall(call_id, name, error=f'"{key}" is {type_name(arguments)}, not an object. Write {example}')
    return ToolCall(call_id, name, arguments)


def dumps(value: Any) -> str:
    """JSON that `parse_json_at` reads back unchanged."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def skip_space(text: str, at: int) -> int:
    return next((i for i in range(at, len(text)) if not text[i].isspace()), len(text))


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{shorten(digits)} is too large a number")
    return value


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from key-value pairs; ValueError for a repeated key."""
    read: dict[str, Any] = {}
    for key, value in pairs:
        if key in read:
            raise ValueError(f"{shorten(key)} is given twice")
        read[key] = value
    return read


JSON = json.JSONDecoder(parse_constant=_constant, parse_float=_finite, object_pairs_hook=unique_pairs)
"""Strict decoder: its values can be written as JSON again."""


def json_error(error: Exception, start: int) -> str:
    """The error message, with positions relative to the call."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}"
    if isinstance(error, UnicodeError):
        return "half of a surrogate pair"
    return "too deeply nested" if isinstance(error, RecursionError) else str(error)


def type_name(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def shorten(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[:most] + "…")
