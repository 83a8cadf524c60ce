"""Messages and tools in OpenAI's format: dicts to `Message` and `ToolSpec`, with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast, get_args

from arborl.errors import did_you_mean
from arborl.types import Message, Role, ToolCall, ToolSpec

ROLES = get_args(Role)
TOOL = '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'
EXAMPLE = '{"role": "user", "content": "…"}'


def read_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Messages from a list of messages and dicts. Raises ValueError."""
    if type(value) not in (tuple, list) and (
        isinstance(value, str | bytes | Mapping | Message) or not hasattr(value, "__iter__")
    ):
        raise ValueError(f"{where}: {type(value).__name__}, not a list of messages. Write [{EXAMPLE}].")
    messages = tuple(value)
    if all(type(one) is Message and type(one.content) is str and one.role in ROLES for one in messages):
        return messages
    return tuple(
        one
        if isinstance(one, Message) and isinstance(one.content, str) and one.role in ROLES
        else read_message(one, f"{where}[{index}]")
        for index, one in enumerate(messages)
    )


def read_tools(value: Any, where: str) -> tuple[ToolSpec, ...]:
    """Tools, or dicts as OpenAI writes them: `{"type": "function", "function": {…}}`. Raises ValueError."""
    if isinstance(value, str | bytes | Mapping | ToolSpec) or not hasattr(value, "__iter__"):
        raise ValueError(f"{where}: {type(value).__name__}, not a list of tools. Write [{TOOL}].")
    return tuple(one if isinstance(one, ToolSpec) else _tool(one, f"{where}[{i}]") for i, one in enumerate(value))


def _tool(value: Any, where: str) -> ToolSpec:
    function = value.get("function", value) if isinstance(value, Mapping) else getattr(value, "spec", None)
    if isinstance(function, ToolSpec):
        return function
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: {type(value).__name__}, not a tool. Write {TOOL}.")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{where}.parameters: {type(parameters).__name__}, not a JSON schema.")
    return ToolSpec(function["name"], str(function.get("description") or ""), dict(parameters))


def read_message(value: Any, where: str) -> Message:
    """One message. Keys without meaning for a model (`id`, `refusal`, …) are ignored. Raises ValueError."""
    if isinstance(value, Message):
        value = {name: getattr(value, name) for name in ("role", "content")}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {type(value).__name__}, not an object. Write {EXAMPLE}.")
    role = value.get("role")
    if role not in ROLES:
        raise ValueError(
            f"{where}.role: {repr(role)[:80]} is not a role.{did_you_mean(str(role)[:80], ROLES)} "
            f"Write one of {', '.join(ROLES)}."
        )
    calls = value.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}.tool_calls: {type(calls).__name__}, not a list of calls.")
    return Message(
        role=cast(Role, role),
        content=_content(value.get("content"), f"{where}.content"),
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=_text_or_none(value, "tool_call_id", where),
        name=_text_or_none(value, "name", where),
    )


def _text_or_none(value: Mapping[str, Any], key: str, where: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}.{key}: {type(text).__name__}, not text.")
    return text


def _content(value: Any, where: str) -> str:
    """Text, or the concatenation of text parts; None is empty."""
    if value is None:
        return ""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: {type(value).__name__}, not text. Write a string, or parts of type 'text'.")
    return "".join(str(text) for text in texts)


def _call(value: Any, where: str) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'{where}: not a call. Write {{"id": "…", "function": {{"name": "…", "arguments": "{{…}}"}}}}')
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.function.arguments: not a JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}.function.arguments: {type(arguments).__name__}, not a JSON object.")
    return ToolCall(str(value.get("id") or ""), function["name"], arguments)
