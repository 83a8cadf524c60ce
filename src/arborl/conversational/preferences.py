"""Preferences as Python code and files have them: pairs of a better and a worse conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from arborl.config.load_config import is_text
from arborl.conversational.trajectory import ConversationTurn, MultiTurnTrajectory
from arborl.data.reading.files import open_table
from arborl.data.reading.given import GivenReader
from arborl.data.reading.rows import read_messages
from arborl.errors import ConfigError
from arborl.rewards.reward_model import up_to_reply
from arborl.seeds import generator
from arborl.types import Message

FORMS = '(better, worse), or {"prompt": …, "chosen": …, "rejected": …}'
SIDES = ("better", "worse")


@dataclass(frozen=True, slots=True)
class Preference:
    """Two conversations of which the first was preferred."""

    better: Sequence[Message]
    worse: Sequence[Message]
    where: str
    """The row, for error messages."""
    weight: float = 1.0

    @property
    def prompt(self) -> str:
        """What both begin with, told by its content; empty where they have no message in common."""
        common = 0
        while common < min(len(self.better), len(self.worse)) and self.better[common] == self.worse[common]:
            common += 1
        return repr(self.better[:common]) if common else ""


def read_preferences(given: Any, fields: Mapping[str, str] | None = None) -> list[Preference]:
    """All rows of a file, or pairs given in Python, each as the conversations that a reward model is shown.

    Args:
        given: pairs, or the path of a file.
        fields: names of columns that are called otherwise: `{"prompt": "question"}`.

    Example:
        read_preferences([("I am sorry. Which order is it?", "Read the website.")])
        read_preferences("pairs.jsonl")
    """
    if isinstance(given, str | PathLike):
        path = Path(given).expanduser()
        table = open_table(path)
        count = int(table.sizes.sum())
        places = (f"{path}, {table.place(number)}" for number in range(count))
        rows: Iterable[tuple[str, Any]] = zip(places, table.rows(range(count)), strict=True)
    elif isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise ConfigError(f"preference_data: {type(given).__name__}. Give a list of {FORMS}, or a file of such rows.")
    else:
        rows = ((f"preference_data, row {number}", row) for number, row in enumerate(given, 1))
    reader = GivenReader("preferences", fields=fields or {}, kind="pairs")
    return [_preference(row, where, reader) for where, row in rows]


def _preference(row: Any, where: str, reader: GivenReader) -> Preference:
    if isinstance(row, Mapping):
        task = reader.task({key: _plain(value) for key, value in row.items()}, where)
        better, worse = (up_to_reply([*task.messages, *side.messages]) for side in task.sides)
        return Preference(_text(better, where), _text(worse, where), where, task.weight)
    if isinstance(row, str | bytes) or not isinstance(row, Sequence) or len(row) != 2:
        size = f" of {len(row)}" if isinstance(row, Sequence) and not isinstance(row, str | bytes) else ""
        raise ConfigError(f"{where}: {type(row).__name__}{size}. Write {FORMS}.")
    better, worse = (_conversation(one, f"{where}, {side}") for one, side in zip(row, SIDES, strict=True))
    if better == worse:
        raise ConfigError(
            f"{where}: better and worse are equal, so there is nothing to prefer. Change one, or drop the row."
        )
    return Preference(_text(better, where), _text(worse, where), where)


def _text(messages: Sequence[Message], where: str) -> Sequence[Message]:
    if not all(is_text(message.content) for message in messages):
        raise ConfigError(f"{where}: half of a surrogate pair, which is no text. Mend the row, or drop it.")
    return messages


def _conversation(given: Any, where: str) -> list[Message]:
    """One side of a tuple: a reply as text, or a conversation."""
    given = _plain(given)
    if isinstance(given, str):
        if not given.strip():
            raise ConfigError(f"{where}: empty. Fill it, or drop the row.")
        return [Message("assistant", given)]
    column = where.rpartition(", ")
    messages = read_messages(given, column[0], column[2])
    if not any(one.role == "assistant" and (one.content.strip() or one.tool_calls) for one in messages):
        raise ConfigError(f'{where}: the assistant says nothing in it. Add {{"role": "assistant", "content": "…"}}.')
    return up_to_reply(messages)


def _plain(given: Any) -> Any:
    """Trajectories, turns and messages in OpenAI's shape; anything else as it is."""
    if isinstance(given, MultiTurnTrajectory):
        given = given.turns
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return [_as_dict(one) if isinstance(one, ConversationTurn | Message) else one for one in given]
    return given


def _as_dict(given: ConversationTurn | Message) -> dict[str, Any]:
    written = isinstance(given, Message) and not given.sampled  # what was sampled has its calls in its text
    calls = {"tool_calls": given.tool_calls} if written and given.tool_calls else {}  # type: ignore[union-attr]
    return {"role": given.role, "content": given.content, **calls}


def held_out(preferences: Sequence[Preference], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the rows to train on, and of those to hold out. Rows with the same prompt are on one side, as long as
    there are prompts enough for that."""
    wanted = max(1, round(share * len(preferences))) if share else 0
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(preferences):
        groups.setdefault(one.prompt or f"row {number}", []).append(number)
    held = set(_drawn(list(groups.values()), wanted, seed))
    if len(held) < wanted / 2:  # few prompts, with many pairs each
        held = set(_drawn([[number] for number in range(len(preferences))], wanted, seed))
    return [number for number in range(len(preferences)) if number not in held], sorted(held)


def _drawn(groups: Sequence[Sequence[int]], wanted: int, seed: int) -> Iterator[int]:
    """Whole groups, as many as fit."""
    left = wanted
    for index in generator(seed, "held out").permutation(len(groups)):
        if len(groups[index]) <= left:
            left -= len(groups[index])
            yield from groups[index]
