"""Rows as tasks: prompts to sample from, and offline rows (transcripts, preference pairs, labelled answers)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from arborl.chat.messages import read_messages, read_tools
from arborl.data.reading.tables import get_path, has_path
from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, Task, ToolSpec

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads rows as tasks. Formats: verl (`prompt`, `reward_model.ground_truth`, `extra_info`), AgentFly (`question`,
    `answer`), OpenAI (`messages`)."""

    source: str
    """Name of the source."""
    question: str = "question"
    """Column of the problem, if there are no messages."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further names for columns; dots select nested values."""

    def task(self, row: Mapping[str, Any], where: str, name: str | None = None, seed: int = 0) -> Task:
        """One row as a task; all columns become fields.

        Args:
            where: file and row, for errors.
            name: id of the task if the row has none; by default a hash of the content.
        """
        columns = self.columns(row, where)
        task_id = columns["id"] if "id" in self.fields else row.get("id")
        if task_id in (None, ""):
            task_id = f"{self.source}/{content_hash(row):016x}" if name is None else f"{self.source}/{name}"
        agent = columns["agent"] if "agent" in self.fields else row.get("agent_name")
        return Task(
            id=str(task_id),
            messages=self.messages(row, columns, where),
            fields=columns,
            source=self.source,
            agent=str(agent) if agent else None,
            seed=seed,
        )

    def columns(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        columns = dict(row)
        if "reward_model" in row and (truth := get_path(row, "reward_model.ground_truth")) is not None:
            columns.setdefault("answer", truth)
        if isinstance(extra := row.get("extra_info"), dict):
            columns = extra | columns
        for key, path in self.fields.items():
            columns[key] = get_path(row, path)
            if columns[key] is None and not has_path(row, path):
                raise ConfigError(f"{where}: no column {path!r} for fields.{key}.{_known_columns(path, row)}")
        return columns

    def messages(self, row: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> Messages:
        """The prompt: `messages`, else the column of the question, else `prompt`."""
        value = columns["messages"] if "messages" in self.fields else row.get("messages")
        if value is not None:
            return messages_of_cell(value, where)
        column = "prompt" if self.question == "question" and row.get("prompt") is not None else self.question
        value = get_path(row, column)
        if isinstance(value, list):
            return messages_of_cell(value, where, column)
        if value is None and column not in row:
            raise ConfigError(
                f"{where}: no column {column!r}.{_known_columns(column, row)} Write data.question=COLUMN, or give a "
                "column 'messages'."
            )
        return (Message("user", _text(value, f"{where}, {column}")),)


def _known_columns(name: str, row: Mapping[str, Any]) -> str:
    names = [str(one) for one in row]
    return f"{did_you_mean(name, names)} It has: {', '.join(names)}."


def content_hash(row: Mapping[str, Any]) -> int:
    """64-bit hash of all columns except `id`."""
    content = {key: value for key, value in row.items() if key != "id"}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def messages_of_cell(value: Any, where: str, column: str = "messages") -> Messages:
    """Messages in OpenAI's format, or as JSON text (a CSV cell)."""
    try:
        return read_messages(_listed(value, where, column), f"{where}, {column}")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _listed(value: Any, where: str, column: str) -> list[Any]:
    value = _parsed(value, where, column)
    if not isinstance(value, list) or not value:
        kind = type(value).__name__
        raise ConfigError(
            f'{where}, {column}: {kind}, not a list of messages. Write [{{"role": "user", "content": "…"}}].'
        )
    return value


def _parsed(value: Any, where: str, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{where}, {column}: not valid JSON: {error}") from error


def _text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {type(text).__name__}, not text.")
    if not text.strip():
        raise ConfigError(f"{where}: empty. Fill it, or drop the row.")
    return text


# ------------------------------------------------------------------------------------------------ offline rows

RowKind = Literal["transcripts", "pairs", "labels"]
"""`sft` needs transcripts, `dpo` and `ipo` pairs, `kto` labels."""
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "transcripts": (
        ("messages",),
        'messages (OpenAI\'s shape), or prompt and completion; for example {"messages": [{"role": "user", '
        '"content": "6*7?"}, {"role": "assistant", "content": "42"}]}',
    ),
    "pairs": (
        ("prompt", "chosen", "rejected"),
        'prompt, chosen and rejected; for example {"prompt": "6*7?", "chosen": "42", "rejected": "41"}',
    ),
    "labels": (
        ("prompt", "completion", "label"),
        'prompt, completion and label; for example {"prompt": "6*7?", "completion": "42", "label": true}',
    ),
}
"""Kind -> columns, and how to write them."""
PAIR_COLUMNS = ("chosen", "rejected")
CONVERSATION_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "label", "tools", "weight")
"""Columns of the conversation; they do not become fields of the task."""
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for its thinking."""
LABELS = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}


@dataclass(frozen=True, slots=True)
class OfflineResponse:
    """Messages after the prompt."""

    messages: Messages
    """From the first assistant message on."""
    trained: tuple[bool, ...]
    """Whether each message is trained on; only assistant messages can be."""
    score: float = 1.0


@dataclass(frozen=True, slots=True)
class OfflineTask(Task):
    """A task with recorded responses."""

    responses: tuple[OfflineResponse, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class OfflineRowReader(RowReader):
    """Reads rows as offline tasks."""

    kind: RowKind = "transcripts"

    def task(self, row: Mapping[str, Any], where: str, name: str | None = None, seed: int = 0) -> OfflineTask:
        plain = RowReader.task(self, row, where, name, seed)
        _, responses = self._read(plain.fields, where)
        known = {field.name: getattr(plain, field.name) for field in fields(Task)}
        known["fields"] = {key: value for key, value in plain.fields.items() if key not in CONVERSATION_COLUMNS}
        tools, weight = _tools(plain.fields.get("tools"), where), _weight(plain.fields.get("weight"), where)
        return OfflineTask(**known, responses=responses, tools=tools, weight=weight)

    def messages(self, row: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> Messages:
        return self._read(columns, where)[0]

    def _read(self, columns: Mapping[str, Any], where: str) -> tuple[Messages, tuple[OfflineResponse, ...]]:
        if self.kind == "pairs":
            return self._pair(columns, where)
        if columns.get("completion") is not None:
            prompt, response = self._completion(columns, "completion", where)
        elif columns.get("messages") is not None:
            prompt, response = _transcript(columns["messages"], where)
        else:
            raise self._wrong_columns(columns, where)
        if self.kind == "labels":
            score = LABELS.get(str(columns.get("label")).lower().removesuffix(".0"))
            if score is None:
                given = f"{where}, label: {columns.get('label')!r}"
                raise ConfigError(f"{given}. Write true where the completion is good, else false.")
            response = replace(response, score=score)
        return prompt, (response,)

    def _pair(self, columns: Mapping[str, Any], where: str) -> tuple[Messages, tuple[OfflineResponse, ...]]:
        if columns.get("chosen") is None or columns.get("rejected") is None:
            raise self._wrong_columns(columns, where)
        first = _unpacked(columns["chosen"])
        first = first[0] if isinstance(first, list) and first else None
        if isinstance(first, Mapping) and first.get("role") in ("system", "user"):
            prompt, better, worse = _shared_prompt(columns, where)
        else:
            prompt, better = self._completion(columns, "chosen", where)
            _, worse = self._completion(columns, "rejected", where)
        if better.messages == worse.messages:
            raise ConfigError(f"{where}: chosen and rejected are equal. Change one, or drop the row.")
        return prompt, (better, replace(worse, score=0.0))

    def _completion(self, columns: Mapping[str, Any], column: str, where: str) -> tuple[Messages, OfflineResponse]:
        """A prompt and its completion, each as text or as messages."""
        given = _unpacked(get_path(columns, "prompt" if self.question == "question" else self.question))
        if given is None:
            raise self._wrong_columns(columns, where)
        if isinstance(given, str):
            prompt: Messages = (Message("user", _text(given, f"{where}, prompt")),)
        else:
            prompt = messages_of_cell(given, where, "prompt")
        if prompt[-1].role == "assistant":
            raise ConfigError(
                f"{where}, prompt: ends with an assistant message. "
                f"End it with a user or tool message, and move the assistant message to {column}."
            )
        completion = _unpacked(columns[column])
        if isinstance(completion, str):
            return prompt, OfflineResponse((Message("assistant", _text(completion, f"{where}, {column}")),), (True,))
        completion = _listed(completion, where, column)
        role = completion[0].get("role") if isinstance(completion[0], Mapping) else "assistant"
        if role != "assistant":
            raise ConfigError(
                f"{where}, {column}: begins with a message of role {role!r}. Let it "
                'begin with {"role": "assistant", …}.'
            )
        return prompt, _response(completion, where, column)

    def _wrong_columns(self, columns: Mapping[str, Any], where: str) -> ConfigError:
        wanted, how = COLUMNS[self.kind]
        name = next((name for name in wanted if columns.get(name) is None), "prompt")
        return ConfigError(
            f"{where}: no column {name!r}.{_known_columns(name, columns)} Write the columns {how}. "
            f"Or say which they are: data.fields={{{name}: COLUMN}}."
        )


def _unpacked(value: Any) -> Any:
    """Messages from JSON text (a CSV cell); other text unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError):
            parsed = json.loads(value)
            if all(isinstance(one, Mapping) and "role" in one for one in parsed):
                return parsed
    return value


def _shared_prompt(columns: Mapping[str, Any], where: str) -> tuple[Messages, OfflineResponse, OfflineResponse]:
    """Two whole conversations: the prompt is their common beginning, up to the first different assistant message."""
    values = [_listed(columns[column], where, column) for column in PAIR_COLUMNS]
    read = [messages_of_cell(one, where, column) for one, column in zip(values, PAIR_COLUMNS, strict=True)]
    shortest = min(map(len, read))
    common = next((i for i, (one, other) in enumerate(zip(*read, strict=False)) if one != other), shortest)
    while common and (common == shortest or read[0][common].role != "assistant"):
        common -= 1
    if not common or read[1][common].role != "assistant":
        raise ConfigError(
            f"{where}: chosen and rejected do not begin with the same messages, or differ in another message than "
            "the assistant's. Write the common messages as prompt, and the replies as chosen and rejected."
        )
    better, worse = (
        _response(one[common:], where, column, common) for one, column in zip(values, PAIR_COLUMNS, strict=True)
    )
    return read[0][:common], better, worse


def _transcript(value: Any, where: str) -> tuple[Messages, OfflineResponse]:
    """A conversation; the prompt ends before the first assistant message."""
    value = _listed(value, where, "messages")
    read = messages_of_cell(value, where)
    begin = next((i for i, message in enumerate(read) if message.role == "assistant"), None)
    if begin is None:
        raise ConfigError(
            f"{where}, messages: there is no assistant message to train on. Add "
            '{"role": "assistant", "content": "…"}, or drop the row.'
        )
    if begin == 0:
        raise ConfigError(
            f'{where}, messages: begins with an assistant message. Put a user message before it: {{"role": "user", …}}.'
        )
    return read[:begin], _response(value[begin:], where, "messages", begin)


def _response(values: Sequence[Any], where: str, column: str, offset: int = 0) -> OfflineResponse:
    messages, trained = [], []
    read = messages_of_cell(list(values), where, column)
    for i, (message, value) in enumerate(zip(read, values, strict=True)):
        at, is_trained = f"{where}, {column}[{offset + i}]", message.role == "assistant"
        if is_trained:
            is_trained, message = _flag(value, at), _with_thinking(message, value)
        if is_trained and not message.content.strip() and not message.tool_calls:
            fix = 'Fill it, write "train": false, or drop the row.'
            raise ConfigError(f"{at}: the assistant message is empty. {fix}")
        messages.append(message)
        trained.append(is_trained)
    if not any(trained):
        raise ConfigError(
            f"{where}, {column}: nothing is trained on: there is no assistant message, or all have "
            '"train": false. Add one, or drop the row.'
        )
    return OfflineResponse(tuple(messages), tuple(trained))


def _flag(message: Any, where: str) -> bool:
    """Whether a message is trained on: `train`, `loss_mask`, or `weight` (OpenAI)."""
    known = message if isinstance(message, Mapping) else {}
    for key in ("train", "loss_mask", "weight"):
        value = known.get(key)
        if value is not None:
            if value not in (0, 1):
                raise ConfigError(f"{where}.{key}: {value!r}. Write true or false.")
            return bool(value)
    return True


def _with_thinking(message: Message, value: Any) -> Message:
    """Thinking from a separate key is put before the content, as models write it."""
    known = value if isinstance(value, Mapping) else {}
    thought = next((known[key] for key in THINKING_KEYS if known.get(key)), None)
    if not isinstance(thought, str) or "<think>" in message.content:
        return message
    return replace(message, content=f"<think>\n{thought.strip()}\n</think>\n\n{message.content}")


def _tools(value: Any, where: str) -> tuple[ToolSpec, ...]:
    if value in (None, "", []):
        return ()
    try:
        return read_tools(_parsed(value, where, "tools"), f"{where}, tools")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _weight(value: Any, where: str) -> float:
    weight = math.nan
    if isinstance(value, int | float | str | None) and not isinstance(value, bool):
        with suppress(ValueError):
            weight = 1.0 if value is None else float(value)
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(f"{where}, weight: {value!r}. Write a number above 0, or drop the row.")
    return weight
