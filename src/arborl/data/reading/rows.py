"""A row as a task: its messages (or its question), its columns as fields, its content as its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arborl.chat import messages as chat
from arborl.data.reading.tables import get_path
from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, Task


@dataclass(frozen=True, slots=True)
class RowReader:
    """How a row becomes a task."""

    source: str
    """What the task says of where it came from."""
    question: str = "question"
    """Column that holds the problem, unless there are messages."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further names for columns, dots reaching inside."""

    def task(self, row: Mapping[str, Any], where: str, name: str | None = None, seed: int = 0) -> Task:
        """One row as a task.

        Rows of verl (`prompt`, `reward_model.ground_truth`, `extra_info`), of AgentFly (`question`, `answer`) and with
        `messages` are read as they are.

        Args:
            row: the columns; all of them become fields.
            where: file and row, for error messages.
            name: the task's id where the row has none; without one it follows from the content.
            seed: the task's.

        Example:
            Reader("train").task({"question": "6*7?", "answer": "42"}, "train.json, row 1").messages
            # (Message("user", "6*7?"),)
        """
        has = self.columns(row, where)
        own = has["id"] if "id" in self.fields else row.get("id")
        if own in (None, ""):
            own = f"{self.source}/{content_hash(row):016x}" if name is None else f"{self.source}/{name}"
        agent = has["agent"] if "agent" in self.fields else row.get("agent_name")
        return Task(
            id=str(own),
            messages=self.messages(row, has, where),
            fields=has,
            source=self.source,
            agent=str(agent) if agent else None,
            seed=seed,
        )

    def columns(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The row's columns, and what else has a name: fields asked for, verl's ground truth, its extra information."""
        has = dict(row)
        if "reward_model" in row and (truth := get_path(row, "reward_model.ground_truth")) is not None:
            has.setdefault("answer", truth)
        if isinstance(extra := row.get("extra_info"), dict):
            has = extra | has
        for key, path in self.fields.items():
            value = get_path(row, path)
            if value is None:
                raise ConfigError(
                    f"{where}: no column {path!r} for fields.{key}.{did_you_mean(path, row)} "
                    f"It has: {', '.join(map(str, row))}."
                )
            has[key] = value
        return has

    def messages(self, row: Mapping[str, Any], has: Mapping[str, Any], where: str) -> tuple[Message, ...]:
        """The problem: `messages`, else the question's column, `prompt` standing in for a `question` by that name."""
        given = has["messages"] if "messages" in self.fields else row.get("messages")
        if given is not None:
            return messages_of_cell(given, where)
        column = self.question
        if column == "question" and row.get("prompt") is not None:
            column = "prompt"
        given = get_path(row, column)
        if isinstance(given, list):
            return messages_of_cell(given, where, column)
        return (Message("user", _question(row, given, column, where)),)


def read_task(row: Mapping[str, Any], question: str, where: str, source: str) -> Task:
    """One row as a task; see `RowReader`."""
    return RowReader(source, question).task(row, where)


def content_hash(row: Mapping[str, Any]) -> int:
    """64 bits that depend on every column but `id`: equal rows are equal, however they are numbered."""
    content = {key: value for key, value in row.items() if key != "id"}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def messages_of_cell(given: Any, where: str, column: str = "messages") -> tuple[Message, ...]:
    """Messages in OpenAI's shape; a JSON text of them (from a CSV cell) will do."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{where}, {column}: not valid JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise ConfigError(f'{where}, {column}: not a list of messages. Write [{{"role": "user", "content": "…"}}].')
    try:
        return chat.read_messages(given, f"{where}, {column}")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _question(row: Mapping[str, Any], text: Any, column: str, where: str) -> str:
    if text is None and column not in row:
        raise ConfigError(
            f"{where}: no column {column!r}.{did_you_mean(column, row)} "
            f"It has: {', '.join(map(str, row))}. Write data.question=COLUMN, or give a column 'messages'."
        )
    if not isinstance(text, str):
        raise ConfigError(f"{where}, {column}: {type(text).__name__}, not text.")
    if not text.strip():
        raise ConfigError(f"{where}, {column}: empty. Fill it, or drop the row.")
    return text
