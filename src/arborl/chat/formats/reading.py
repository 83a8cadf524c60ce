"""Strict JSON out of what a model wrote, and readable words for what is wrong with it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from arborl.types import ToolCall

Block = Any | ValueError
"""The value of one piece of JSON, or why there is none."""


def value_at(text: str, at: int, shape: str) -> tuple[Block, int | None]:
    """The JSON value at `at`, white space skipped, and where it ends; or its error, and None."""
    start = skip_space(text, at)
    try:
        value, end = JSON.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except (ValueError, RecursionError) as error:
        return ValueError(f"the tool call is not valid JSON ({reason(error, start)}). Write {shape}"), None
    return value, end


def read_call(call_id: str, block: Block, shape: str, keys: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """A call from the value of one block.

    Args:
        call_id: the id it gets.
        block: the value, or its error.
        shape: a well-formed call, for error messages.
        keys: what the arguments may be called; the first is the usual name.
    """
    if isinstance(block, ValueError):
        return ToolCall(call_id, "", error=str(block))
    if not isinstance(block, dict):
        return ToolCall(call_id, "", error=f"the tool call is {kind(block)}, not an object. Write {shape}")
    name = block.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", error=f'the tool call has no "name". Write {shape}')
    key = next((key for key in keys if key in block), keys[0])
    return with_arguments(call_id, name, block.get(key, {}), key, shape)


def with_arguments(call_id: str, name: str, arguments: Any, key: str, shape: str) -> ToolCall:
    """A call, where its arguments are an object or a text that holds one."""
    if isinstance(arguments, str):
        inner, end = value_at(arguments, 0, shape)
        if end is not None and isinstance(inner, dict) and not arguments[end:].strip():
            arguments = inner
    if not isinstance(arguments, dict):
        example = shape.replace("TOOL", name)
        return ToolCall(call_id, name, error=f'"{key}" is {kind(arguments)}, not an object. Write {example}')
    return ToolCall(call_id, name, arguments)


def dumps(value: Any) -> str:
    """JSON that `value_at` reads back as it was."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def skip_space(text: str, at: int) -> int:
    return next((i for i in range(at, len(text)) if not text[i].isspace()), len(text))


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{short(digits)} is too large a number")
    return value


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its keys and values. Of a key that comes twice nobody knows which value was meant."""
    read: dict[str, Any] = {}
    for key, value in pairs:
        if key in read:
            raise ValueError(f"{short(key)} is given twice")
        read[key] = value
    return read


JSON = json.JSONDecoder(parse_constant=_constant, parse_float=_finite, object_pairs_hook=without_repeats)
"""Strict: what it reads can be written as JSON again."""


def reason(error: Exception, start: int) -> str:
    """Positions are told within the call, as its writer sees it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}"
    if isinstance(error, UnicodeError):
        return "half of a surrogate pair"
    return "too deeply nested" if isinstance(error, RecursionError) else str(error)


def kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def short(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[:most] + "…")
