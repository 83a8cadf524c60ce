"""A row as something that was said: a transcript to imitate, a pair of which one is better, a good or a bad answer.

Nothing of it is sampled. The row's prompt becomes the task's messages, and what was said behind it its responses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from arborl.chat.messages import read_tools
from arborl.data.reading.rows import RowReader, messages_of_cell
from arborl.data.reading.tables import get_path
from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, Task, ToolSpec

RowKind = Literal["transcripts", "pairs", "labels"]
"""What is learned from: `sft` wants transcripts, `dpo` and `ipo` pairs, `kto` labels."""
COLUMNS: dict[str, str] = {
    "transcripts": 'messages (OpenAI\'s shape), or prompt and completion; for example {"messages": [{"role": "user", '
    '"content": "6*7?"}, {"role": "assistant", "content": "42"}]}',
    "pairs": 'prompt, chosen and rejected; for example {"prompt": "6*7?", "chosen": "42", "rejected": "41"}',
    "labels": 'prompt, completion and label; for example {"prompt": "6*7?", "completion": "42", "label": true}',
}
SIDES = ("chosen", "rejected")
TOLD = ("messages", "prompt", "completion", "chosen", "rejected", "label", "tools", "weight")
"""Columns that say what was said; they do not go along as fields."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which files keep its thoughts."""


@dataclass(frozen=True, slots=True)
class OfflineResponse:
    """What was said behind the prompt."""

    messages: tuple[Message, ...]
    """From the first of the assistant's on."""
    trained: tuple[bool, ...]
    """Whether each is learned from; only the assistant's can be."""
    score: float = 1.0


@dataclass(frozen=True, slots=True)
class OfflineTask(Task):
    """A task with what was said at it."""

    responses: tuple[OfflineResponse, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class OfflineRowReader(RowReader):
    """How a row becomes a given task."""

    kind: RowKind = "transcripts"

    def task(self, row: Mapping[str, Any], where: str, name: str | None = None, seed: int = 0) -> OfflineTask:
        plain = RowReader.task(self, row, where, name, seed)
        _, responses, tools, weight = self._read(plain.fields, where)
        known = {field.name: getattr(plain, field.name) for field in fields(Task)}
        known["fields"] = {key: value for key, value in plain.fields.items() if key not in TOLD}
        return OfflineTask(**known, responses=responses, tools=tools, weight=weight)

    def messages(self, row: Mapping[str, Any], has: Mapping[str, Any], where: str) -> tuple[Message, ...]:
        """The prompt."""
        return self._read(has, where)[0]

    def _read(
        self, has: Mapping[str, Any], where: str
    ) -> tuple[tuple[Message, ...], tuple[OfflineResponse, ...], tuple[ToolSpec, ...], float]:
        """Prompt, responses, tools and weight."""
        if self.kind == "pairs":
            prompt, responses = self._pair(has, where)
        elif has.get("completion") is not None:
            prompt, side = self._completion(has, "completion", where)
            responses = (side,)
        elif has.get("messages") is not None:
            prompt, side = _transcript(has["messages"], where)
            responses = (side,)
        else:
            raise self._wrong_columns(has, where)
        if self.kind == "labels":
            responses = (replace(responses[0], score=_label(has, where)),)
        return prompt, responses, _tools(has.get("tools"), where), _weight(has.get("weight"), where)

    def _pair(self, has: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[OfflineResponse, ...]]:
        if has.get("chosen") is None or has.get("rejected") is None:
            raise self._wrong_columns(has, where)
        if _whole(has["chosen"]):
            prompt, better, worse = _shared(has, where)
        else:
            prompt, better = self._completion(has, "chosen", where)
            _, worse = self._completion(has, "rejected", where)
        if better.messages == worse.messages:
            raise ConfigError(
                f"{where}: chosen and rejected are equal, so there is nothing to prefer. Change one, or drop the row."
            )
        return prompt, (better, replace(worse, score=0.0))

    def _prompt(self, has: Mapping[str, Any]) -> Any:
        return get_path(has, "prompt" if self.question == "question" else self.question)

    def _completion(
        self, has: Mapping[str, Any], column: str, where: str
    ) -> tuple[tuple[Message, ...], OfflineResponse]:
        """A prompt and what follows it, each as text or as messages."""
        asked, said = self._prompt(has), has[column]
        if asked is None:
            raise self._wrong_columns(has, where)
        asked, said = _unpacked(asked), _unpacked(said)
        if isinstance(asked, str):
            prompt: tuple[Message, ...] = (Message("user", _text(asked, f"{where}, prompt")),)
        else:
            prompt = messages_of_cell(asked, where, "prompt")
        if prompt[-1].role == "assistant":
            raise ConfigError(
                f"{where}, prompt: ends with a message of the assistant, and what comes next is the assistant's too. "
                f"End it with a user's or a tool's message, and put what the assistant said into {column}."
            )
        if isinstance(said, str):
            return prompt, OfflineResponse((Message("assistant", _text(said, f"{where}, {column}")),), (True,))
        said = _listed(said, where, column)
        if said and isinstance(said[0], Mapping) and said[0].get("role") != "assistant":
            raise ConfigError(
                f"{where}, {column}: begins with a message of role {said[0].get('role')!r}. It follows the prompt, so "
                'begin it with {"role": "assistant", …}.'
            )
        return prompt, _side(said, where, column)

    def _wrong_columns(self, has: Mapping[str, Any], where: str) -> ConfigError:
        wants = {"transcripts": ("messages",), "pairs": ("prompt", "chosen", "rejected")}
        missing = [name for name in wants.get(self.kind, ("prompt", "completion", "label")) if has.get(name) is None]
        name = missing[0] if missing else "prompt"
        near = did_you_mean(name, [str(one) for one in has])
        return ConfigError(
            f"{where}: no column {name!r}.{near} It has: {', '.join(map(str, has))}. Write the columns "
            f"{COLUMNS[self.kind]}. Or say which they are: data.fields={{{name}: COLUMN}}."
        )


def _unpacked(given: Any) -> Any:
    """Messages that stand in a text as JSON (a cell of a CSV file) as messages; any other text as it is."""
    if isinstance(given, str) and given.lstrip().startswith("[{"):
        with suppress(ValueError):
            found = json.loads(given)
            if all(isinstance(one, Mapping) and "role" in one for one in found):
                return found
    return given


def _whole(given: Any) -> bool:
    """Whether a side of a pair is a conversation from its beginning."""
    given = _unpacked(given)
    first = given[0] if isinstance(given, list) and given else None
    return isinstance(first, Mapping) and first.get("role") in ("system", "user")


def _shared(has: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], OfflineResponse, OfflineResponse]:
    """Two whole conversations: what they have in common, up to the assistant's first other word, is the prompt."""
    given = [_listed(has[column], where, column) for column in SIDES]
    read = [messages_of_cell(one, where, column) for one, column in zip(given, SIDES, strict=True)]
    common = next((i for i, (one, other) in enumerate(zip(*read, strict=False)) if one != other), min(map(len, read)))
    while common and (common == min(map(len, read)) or read[0][common].role != "assistant"):
        common -= 1
    if not common or read[1][common].role != "assistant":
        raise ConfigError(
            f"{where}: chosen and rejected do not begin with the same messages, or differ before the assistant speaks. "
            "Write what they share as prompt, and in chosen and rejected what the assistant said."
        )
    better, worse = (_side(one[common:], where, column, common) for one, column in zip(given, SIDES, strict=True))
    return read[0][:common], better, worse


def _transcript(given: Any, where: str) -> tuple[tuple[Message, ...], OfflineResponse]:
    """A conversation; before the assistant's first message is the prompt."""
    given = _listed(given, where, "messages")
    read = messages_of_cell(given, where)
    begin = next((i for i, message in enumerate(read) if message.role == "assistant"), None)
    if begin is None:
        raise ConfigError(
            f"{where}, messages: the assistant says nothing in it, so there is nothing to learn. Add "
            '{"role": "assistant", "content": "…"}, or drop the row.'
        )
    if begin == 0:
        raise ConfigError(
            f'{where}, messages: begins with the assistant. Put before it what it answers: {{"role": "user", …}}.'
        )
    return read[:begin], _side(given[begin:], where, "messages", begin)


def _side(given: Sequence[Any], where: str, column: str, offset: int = 0) -> OfflineResponse:
    read = messages_of_cell(list(given), where, column)
    trained = tuple(
        message.role == "assistant" and _flag(one, f"{where}, {column}[{offset + i}]")
        for i, (message, one) in enumerate(zip(read, given, strict=True))
    )
    messages = tuple(
        _with_thoughts(message, one) if message.role == "assistant" else message
        for message, one in zip(read, given, strict=True)
    )
    for i, (message, learned) in enumerate(zip(messages, trained, strict=True)):
        if learned and not message.content.strip() and not message.tool_calls:
            raise ConfigError(
                f'{where}, {column}[{offset + i}]: the assistant says nothing. Fill it, write "train": false there, or '
                "drop the row."
            )
    if not any(trained):
        raise ConfigError(
            f"{where}, {column}: nothing of it is learned from: no message of the assistant is there, or all have "
            '"train": false. Add one, or drop the row.'
        )
    return OfflineResponse(messages, trained)


def _flag(given: Any, where: str) -> bool:
    """Whether a message is learned from: `train`, or as others write it `loss_mask`, or `weight` (OpenAI)."""
    if not isinstance(given, Mapping):
        return True
    for key in ("train", "loss_mask", "weight"):
        value = given.get(key)
        if value is not None:
            if value not in (0, 1):
                raise ConfigError(f"{where}.{key}: {value!r}. Write true or false.")
            return bool(value)
    return True


def _with_thoughts(message: Message, given: Any) -> Message:
    """Thoughts that stand beside the content come before it, as models write them."""
    thought = next((given[key] for key in THOUGHTS if given.get(key)), None) if isinstance(given, Mapping) else None
    if not isinstance(thought, str) or "<think>" in message.content:
        return message
    return replace(message, content=f"<think>\n{thought.strip()}\n</think>\n\n{message.content}")


def _listed(given: Any, where: str, column: str) -> list[Any]:
    """Messages as a list; a text may hold it as JSON."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{where}, {column}: not valid JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise ConfigError(
            f"{where}, {column}: {type(given).__name__}, not a list of messages. Write "
            '[{"role": "assistant", "content": "…"}].'
        )
    return given


def _text(text: str, where: str) -> str:
    if not text.strip():
        raise ConfigError(f"{where}: empty. Fill it, or drop the row.")
    return text


def _tools(given: Any, where: str) -> tuple[ToolSpec, ...]:
    if given in (None, "", []):
        return ()
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{where}, tools: not valid JSON: {error}") from error
    try:
        return read_tools(given, f"{where}, tools")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _weight(given: Any, where: str) -> float:
    if given is None:
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ConfigError(f"{where}, weight: {type(given).__name__}, not a number.")
    try:
        weight = float(given)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(f"{where}, weight: {given!r}. Write a number above 0, or drop the row.")
    return weight


LABELS = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}


def _label(has: Mapping[str, Any], where: str) -> float:
    given = has.get("label")
    found = LABELS.get(str(given).lower().removesuffix(".0"))
    if found is None:
        raise ConfigError(f"{where}, label: {given!r}. Write true where the completion is good, else false.")
    return found
