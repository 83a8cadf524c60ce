"""Messages in OpenAI's shape: dicts become `Message`s, and what is none is refused with the name of its field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast, get_args

from arborl.errors import did_you_mean
from arborl.types import Message, Role, ToolCall, ToolSpec

ROLES = get_args(Role)
TOOL = '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'
EXAMPLE = '{"role": "user", "content": "…"}'


def read_messages(given: Any, where: str) -> tuple[Message, ...]:
    """A list of messages or of dicts, or a mix of both. Raises ValueError.

    Example:
        read_messages([Message("system", "Be brief."), {"role": "user", "content": "6*7?"}], "messages")
    """
    if type(given) not in (tuple, list) and (
        isinstance(given, str | bytes | Mapping | Message) or not hasattr(given, "__iter__")
    ):
        raise ValueError(f"{where}: {type(given).__name__}, not a list of messages. Write [{EXAMPLE}].")
    messages = tuple(given)
    if all(type(one) is Message and type(one.content) is str and one.role in ROLES for one in messages):
        return messages
    return tuple(
        one if isinstance(one, Message) and _is_sound(one) else read_message(one, f"{where}[{index}]")
        for index, one in enumerate(messages)
    )


def read_tools(given: Any, where: str) -> tuple[ToolSpec, ...]:
    """Tools, or dicts as OpenAI writes them: `{"type": "function", "function": {…}}`. Raises ValueError."""
    if isinstance(given, str | bytes | Mapping | ToolSpec) or not hasattr(given, "__iter__"):
        raise ValueError(f"{where}: {type(given).__name__}, not a list of tools. Write [{TOOL}].")
    return tuple(
        one if isinstance(one, ToolSpec) else _tool(one, f"{where}[{index}]") for index, one in enumerate(given)
    )


def _tool(given: Any, where: str) -> ToolSpec:
    function = given.get("function", given) if isinstance(given, Mapping) else getattr(given, "spec", None)
    if isinstance(function, ToolSpec):
        return function
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: {type(given).__name__}, not a tool. Write {TOOL}.")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{where}.parameters: {type(parameters).__name__}, not a JSON schema.")
    return ToolSpec(function["name"], str(function.get("description") or ""), dict(parameters))


def read_message(given: Any, where: str) -> Message:
    """One message. Keys that say nothing to a model (`id`, `refusal`, …) are passed over. Raises ValueError."""
    if isinstance(given, Message):
        given = {name: getattr(given, name) for name in ("role", "content")}
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: {type(given).__name__}, not an object. Write {EXAMPLE}.")
    role = given.get("role")
    if role not in ROLES:
        raise ValueError(
            f"{where}.role: {repr(role)[:80]} is not a role.{did_you_mean(str(role)[:80], ROLES)} "
            f"Write one of {', '.join(ROLES)}."
        )
    calls = given.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}.tool_calls: {type(calls).__name__}, not a list of calls.")
    return Message(
        role=cast(Role, role),
        content=_content(given.get("content"), f"{where}.content"),
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=_text_or_none(given, "tool_call_id", where),
        name=_text_or_none(given, "name", where),
    )


def _is_sound(message: Message) -> bool:
    return isinstance(message.content, str) and message.role in ROLES


def _text_or_none(given: Mapping[str, Any], key: str, where: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}.{key}: {type(value).__name__}, not text.")
    return value


def _content(given: Any, where: str) -> str:
    """Text; or parts of text, joined. Nothing, as beside tool calls, is the empty text."""
    if given is None:
        return ""
    parts = given if isinstance(given, list) else [{"type": "text", "text": given}]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: {type(given).__name__}, not text. Write a string, or parts of type 'text'.")
    return "".join(str(text) for text in texts)


def _call(given: Any, where: str) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'{where}: not a call. Write {{"id": "…", "function": {{"name": "…", "arguments": "{{…}}"}}}}.'
        )
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.function.arguments: not a JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}.function.arguments: {type(arguments).__name__}, not a JSON object.")
    return ToolCall(str(given.get("id") or ""), function["name"], arguments)
