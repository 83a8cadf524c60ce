"""A row as a task: its messages (or its question), its columns as fields, its content as its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast, get_args

from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, Role, Task, ToolCall

ROLES = get_args(Role)


def read_task(row: Mapping[str, Any], question: str, where: str, source: str) -> Task:
    """One row as a task.

    Args:
        row: the columns; all of them become fields.
        question: column that holds the problem, unless there is a column `messages`.
        where: file and row, for error messages.
        source: what the task says of where it came from.

    Example:
        read_task({"question": "6*7?", "answer": "42"}, "question", "train.json, row 1", "train").messages
        # (Message("user", "6*7?"),)
    """
    given = row.get("messages")
    messages = read_messages(given, where) if given is not None else (Message("user", _question(row, question, where)),)
    name = row.get("id")
    return Task(
        id=str(name) if name not in (None, "") else f"{source}/{content_hash(row):016x}",
        messages=messages,
        fields=dict(row),
        source=source,
        agent=str(row["agent_name"]) if row.get("agent_name") else None,
    )


def content_hash(row: Mapping[str, Any]) -> int:
    """64 bits that depend on every column but `id`: equal rows are equal, however they are numbered."""
    content = {key: value for key, value in row.items() if key != "id"}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def read_messages(given: Any, where: str) -> tuple[Message, ...]:
    """Messages in OpenAI's shape; a JSON text of them (from a CSV cell) will do."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{where}, messages: not valid JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise ConfigError(f'{where}, messages: not a list of messages. Write [{{"role": "user", "content": "…"}}].')
    return tuple(_message(one, f"{where}, messages[{index}]") for index, one in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise ConfigError(f'{where}: {type(given).__name__}, not an object. Write {{"role": "user", "content": "…"}}.')
    role = given.get("role")
    if role not in ROLES:
        raise ConfigError(
            f"{where}.role: {role!r} is not a role.{did_you_mean(str(role), ROLES)} Write one of {', '.join(ROLES)}."
        )
    calls = given.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ConfigError(f"{where}.tool_calls: {type(calls).__name__}, not a list of calls.")
    return Message(
        role=cast(Role, role),
        content=_content(given.get("content"), f"{where}.content"),
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=given.get("tool_call_id"),
        name=given.get("name"),
    )


def _content(given: Any, where: str) -> str:
    """Text; or parts of text, joined. Nothing, as beside tool calls, is the empty text."""
    if given is None:
        return ""
    parts = given if isinstance(given, list) else [{"type": "text", "text": given}]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: {type(given).__name__}, not text. Write a string, or parts of type 'text'.")
    return "".join(str(text) for text in texts)


def _call(given: Any, where: str) -> ToolCall:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f'{where}: not a call. Write {{"id": "…", "function": {{"name": "…", "arguments": "{{…}}"}}}}.'
        )
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}.function.arguments: not a JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where}.function.arguments: {type(arguments).__name__}, not a JSON object.")
    return ToolCall(str(given.get("id") or ""), function["name"], arguments)


def _question(row: Mapping[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise ConfigError(
            f"{where}: no column {column!r}.{did_you_mean(column, row)} "
            f"It has: {', '.join(map(str, row))}. Write data.question=COLUMN, or give a column 'messages'."
        )
    text = row[column]
    if not isinstance(text, str):
        raise ConfigError(f"{where}, {column}: {type(text).__name__}, not text.")
    if not text.strip():
        raise ConfigError(f"{where}, {column}: empty. Fill it, or drop the row.")
    return text
