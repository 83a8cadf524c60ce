"""Rows as tasks: prompts to sample from, and offline rows (transcripts, preference pairs, labelled answers)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from arborl.chat import messages as chat
from arborl.chat.messages import read_tools
from arborl.data.reading.tables import get_path
from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, Task, ToolSpec


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads rows as tasks."""

    source: str
    """Name of the source."""
    question: str = "question"
    """Column of the problem, if there are no messages."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further names for columns; dots select nested values."""

    def task(self, row: Mapping[str, Any], where: str, name: str | None = None, seed: int = 0) -> Task:
        """One row as a task.

        Formats: verl (`prompt`, `reward_model.ground_truth`, `extra_info`), AgentFly (`question`, `answer`), OpenAI.

        Args:
            row: the columns; all of them become fields.
            where: file and row, for errors.
            name: id of the task if the row has none; by default a hash of the content.
            seed: of the task.

        Example:
            Reader("train").task({"question": "6*7?", "answer": "42"}, "train.json, row 1").messages
            # (Message("user", "6*7?"),)
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
        """The columns, the configured fields, verl's ground truth and extra information."""
        columns = dict(row)
        if "reward_model" in row and (truth := get_path(row, "reward_model.ground_truth")) is not None:
            columns.setdefault("answer", truth)
        if isinstance(extra := row.get("extra_info"), dict):
            columns = extra | columns
        for key, path in self.fields.items():
            value = get_path(row, path)
            if value is None:
                raise ConfigError(
                    f"{where}: no column {path!r} for fields.{key}.{did_you_mean(path, row)} "
                    f"It has: {', '.join(map(str, row))}."
                )
            columns[key] = value
        return columns

    def messages(self, row: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> tuple[Message, ...]:
        """The prompt: `messages`, else the column of the question, else `prompt`."""
        value = columns["messages"] if "messages" in self.fields else row.get("messages")
        if value is not None:
            return messages_of_cell(value, where)
        column = self.question
        if column == "question" and row.get("prompt") is not None:
            column = "prompt"
        value = get_path(row, column)
        if isinstance(value, list):
            return messages_of_cell(value, where, column)
        return (Message("user", _question(row, value, column, where)),)


def read_task(row: Mapping[str, Any], question: str, where: str, source: str) -> Task:
    """One row as a task; see `RowReader`."""
    return RowReader(source, question).task(row, where)


def content_hash(row: Mapping[str, Any]) -> int:
    """64-bit hash of all columns except `id`."""
    content = {key: value for key, value in row.items() if key != "id"}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def messages_of_cell(value: Any, where: str, column: str = "messages") -> tuple[Message, ...]:
    """Messages in OpenAI's format, or as JSON text (a CSV cell)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where}, {column}: not valid JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise ConfigError(f'{where}, {column}: not a list of messages. Write [{{"role": "user", "content": "…"}}].')
    try:
        return chat.read_messages(value, f"{where}, {column}")
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


# ------------------------------------------------------------------------------------------------ offline rows

RowKind = Literal["transcripts", "pairs", "labels"]
"""`sft` needs transcripts, `dpo` and `ipo` pairs, `kto` labels."""
COLUMNS: dict[str, str] = {
    "transcripts": 'messages (OpenAI\'s shape), or prompt and completion; for example {"messages": [{"role": "user", '
    '"content": "6*7?"}, {"role": "assistant", "content": "42"}]}',
    "pairs": 'prompt, chosen and rejected; for example {"prompt": "6*7?", "chosen": "42", "rejected": "41"}',
    "labels": 'prompt, completion and label; for example {"prompt": "6*7?", "completion": "42", "label": true}',
}
PAIR_COLUMNS = ("chosen", "rejected")
CONVERSATION_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "label", "tools", "weight")
"""Columns of the conversation; they do not become fields of the task."""
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for its thinking."""


@dataclass(frozen=True, slots=True)
class OfflineResponse:
    """Messages after the prompt."""

    messages: tuple[Message, ...]
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
        _, responses, tools, weight = self._read(plain.fields, where)
        known = {field.name: getattr(plain, field.name) for field in fields(Task)}
        known["fields"] = {key: value for key, value in plain.fields.items() if key not in CONVERSATION_COLUMNS}
        return OfflineTask(**known, responses=responses, tools=tools, weight=weight)

    def messages(self, row: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> tuple[Message, ...]:
        """The prompt."""
        return self._read(columns, where)[0]

    def _read(
        self, columns: Mapping[str, Any], where: str
    ) -> tuple[tuple[Message, ...], tuple[OfflineResponse, ...], tuple[ToolSpec, ...], float]:
        """Prompt, responses, tools and weight."""
        if self.kind == "pairs":
            prompt, responses = self._pair(columns, where)
        elif columns.get("completion") is not None:
            prompt, response = self._completion(columns, "completion", where)
            responses = (response,)
        elif columns.get("messages") is not None:
            prompt, response = _transcript(columns["messages"], where)
            responses = (response,)
        else:
            raise self._wrong_columns(columns, where)
        if self.kind == "labels":
            responses = (replace(responses[0], score=_label(columns, where)),)
        return prompt, responses, _tools(columns.get("tools"), where), _weight(columns.get("weight"), where)

    def _pair(self, columns: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[OfflineResponse, ...]]:
        if columns.get("chosen") is None or columns.get("rejected") is None:
            raise self._wrong_columns(columns, where)
        if _is_whole(columns["chosen"]):
            prompt, better, worse = _shared_prompt(columns, where)
        else:
            prompt, better = self._completion(columns, "chosen", where)
            _, worse = self._completion(columns, "rejected", where)
        if better.messages == worse.messages:
            raise ConfigError(f"{where}: chosen and rejected are equal. Change one, or drop the row.")
        return prompt, (better, replace(worse, score=0.0))

    def _prompt(self, columns: Mapping[str, Any]) -> Any:
        return get_path(columns, "prompt" if self.question == "question" else self.question)

    def _completion(
        self, columns: Mapping[str, Any], column: str, where: str
    ) -> tuple[tuple[Message, ...], OfflineResponse]:
        """A prompt and its completion, each as text or as messages."""
        prompt_value, completion = self._prompt(columns), columns[column]
        if prompt_value is None:
            raise self._wrong_columns(columns, where)
        prompt_value, completion = _unpacked(prompt_value), _unpacked(completion)
        if isinstance(prompt_value, str):
            prompt: tuple[Message, ...] = (Message("user", _text(prompt_value, f"{where}, prompt")),)
        else:
            prompt = messages_of_cell(prompt_value, where, "prompt")
        if prompt[-1].role == "assistant":
            raise ConfigError(
                f"{where}, prompt: ends with an assistant message. "
                f"End it with a user or tool message, and move the assistant message to {column}."
            )
        if isinstance(completion, str):
            return prompt, OfflineResponse((Message("assistant", _text(completion, f"{where}, {column}")),), (True,))
        completion = _listed(completion, where, column)
        if completion and isinstance(completion[0], Mapping) and completion[0].get("role") != "assistant":
            raise ConfigError(
                f"{where}, {column}: begins with a message of role {completion[0].get('role')!r}. Let it "
                'begin with {"role": "assistant", …}.'
            )
        return prompt, _response(completion, where, column)

    def _wrong_columns(self, columns: Mapping[str, Any], where: str) -> ConfigError:
        wants = {"transcripts": ("messages",), "pairs": ("prompt", "chosen", "rejected")}
        missing = [
            name for name in wants.get(self.kind, ("prompt", "completion", "label")) if columns.get(name) is None
        ]
        name = missing[0] if missing else "prompt"
        near = did_you_mean(name, [str(one) for one in columns])
        return ConfigError(
            f"{where}: no column {name!r}.{near} It has: {', '.join(map(str, columns))}. Write the columns "
            f"{COLUMNS[self.kind]}. Or say which they are: data.fields={{{name}: COLUMN}}."
        )


def _unpacked(value: Any) -> Any:
    """Messages from JSON text (a CSV cell); other text unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError):
            parsed = json.loads(value)
            if all(isinstance(one, Mapping) and "role" in one for one in parsed):
                return parsed
    return value


def _is_whole(value: Any) -> bool:
    """Whether one response of a pair is a whole conversation."""
    value = _unpacked(value)
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and first.get("role") in ("system", "user")


def _shared_prompt(
    columns: Mapping[str, Any], where: str
) -> tuple[tuple[Message, ...], OfflineResponse, OfflineResponse]:
    """Two whole conversations: the prompt is their common beginning, up to the first different assistant message."""
    value = [_listed(columns[column], where, column) for column in PAIR_COLUMNS]
    read = [messages_of_cell(one, where, column) for one, column in zip(value, PAIR_COLUMNS, strict=True)]
    common = next((i for i, (one, other) in enumerate(zip(*read, strict=False)) if one != other), min(map(len, read)))
    while common and (common == min(map(len, read)) or read[0][common].role != "assistant"):
        common -= 1
    if not common or read[1][common].role != "assistant":
        raise ConfigError(
            f"{where}: chosen and rejected do not begin with the same messages, or differ in another message than "
            "the assistant's. Write the common messages as prompt, and the replies as chosen and rejected."
        )
    better, worse = (
        _response(one[common:], where, column, common) for one, column in zip(value, PAIR_COLUMNS, strict=True)
    )
    return read[0][:common], better, worse


def _transcript(value: Any, where: str) -> tuple[tuple[Message, ...], OfflineResponse]:
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


def _response(value: Sequence[Any], where: str, column: str, offset: int = 0) -> OfflineResponse:
    read = messages_of_cell(list(value), where, column)
    trained = tuple(
        message.role == "assistant" and _flag(one, f"{where}, {column}[{offset + i}]")
        for i, (message, one) in enumerate(zip(read, value, strict=True))
    )
    messages = tuple(
        _with_thinking(message, one) if message.role == "assistant" else message
        for message, one in zip(read, value, strict=True)
    )
    for i, (message, learned) in enumerate(zip(messages, trained, strict=True)):
        if learned and not message.content.strip() and not message.tool_calls:
            raise ConfigError(
                f'{where}, {column}[{offset + i}]: the assistant message is empty. Fill it, write "train": false, or '
                "drop the row."
            )
    if not any(trained):
        raise ConfigError(
            f"{where}, {column}: nothing is trained on: there is no assistant message, or all have "
            '"train": false. Add one, or drop the row.'
        )
    return OfflineResponse(messages, trained)


def _flag(message: Any, where: str) -> bool:
    """Whether a message is trained on: `train`, `loss_mask`, or `weight` (OpenAI)."""
    if not isinstance(message, Mapping):
        return True
    for key in ("train", "loss_mask", "weight"):
        value = message.get(key)
        if value is not None:
            if value not in (0, 1):
                raise ConfigError(f"{where}.{key}: {value!r}. Write true or false.")
            return bool(value)
    return True


def _with_thinking(message: Message, value: Any) -> Message:
    """Thinking from a separate key is put before the content, as models write it."""
    thought = (
        next((value[key] for key in THINKING_KEYS if value.get(key)), None) if isinstance(value, Mapping) else None
    )
    if not isinstance(thought, str) or "<think>" in message.content:
        return message
    return replace(message, content=f"<think>\n{thought.strip()}\n</think>\n\n{message.content}")


def _listed(value: Any, where: str, column: str) -> list[Any]:
    """Messages as a list; JSON text is parsed."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where}, {column}: not valid JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where}, {column}: {type(value).__name__}, not a list of messages. Write "
            '[{"role": "assistant", "content": "…"}].'
        )
    return value


def _text(text: str, where: str) -> str:
    if not text.strip():
        raise ConfigError(f"{where}: empty. Fill it, or drop the row.")
    return text


def _tools(value: Any, where: str) -> tuple[ToolSpec, ...]:
    if value in (None, "", []):
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where}, tools: not valid JSON: {error}") from error
    try:
        return read_tools(value, f"{where}, tools")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _weight(value: Any, where: str) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{where}, weight: {type(value).__name__}, not a number.")
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(f"{where}, weight: {value!r}. Write a number above 0, or drop the row.")
    return weight


LABELS = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}


def _label(columns: Mapping[str, Any], where: str) -> float:
    value = columns.get("label")
    parsed = LABELS.get(str(value).lower().removesuffix(".0"))
    if parsed is None:
        raise ConfigError(f"{where}, label: {value!r}. Write true where the completion is good, else false.")
    return parsed
