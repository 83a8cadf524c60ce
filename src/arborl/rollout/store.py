"""The episode file: every episode of a step, one JSON object a line, nothing lost.

Viewer, evaluation, replay and debugging read the same lines. Numbers keep every bit; a number that is not finite is
written as Python writes it (`NaN`, `-Infinity`). What a task's fields hold beyond JSON is written as the nearest JSON
(a tuple as a list, an array as lists, anything else as its text).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core

from arborl.errors import ConfigError, disk_errors
from arborl.tokens import Tokens
from arborl.track.folder_files import entries_of, parse_json, read_lines
from arborl.types import (
    Call,
    Completion,
    Episode,
    Failure,
    FinishReason,
    Group,
    Message,
    SamplingDistribution,
    StopReason,
    Task,
    ToolCall,
    Turn,
)

log = logging.getLogger(__name__)

SCALARS = frozenset({str, int, float, bool, type(None)})
FILE = re.compile(r"step-(\d{1,12})\.jsonl", re.ASCII)


class EpisodeStore:
    """A folder of episode files, one a step.

    Example:
        store = EpisodeStore(folder / "episodes")
        path = store.write(12, groups)                 # episodes/step-000012.jsonl
        rewards = [episode.reward for episode in store.read(path)]
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """Write the episodes of a step, whole or not at all. Writing a step again replaces it."""
        path = self.folder / f"step-{step:06}.jsonl"
        fresh = path.with_name(f".{path.name}.tmp")
        with disk_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with fresh.open("wb") as file:
                    for group in groups:
                        file.writelines(_line(to_json(episode)) + b"\n" for episode in group.episodes)
                os.replace(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """The files, first step first."""
        found = [Path(entry.path) for entry in entries_of(self.folder) if FILE.fullmatch(entry.name)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))

    @staticmethod
    def read(path: Path) -> Iterator[Episode]:
        """The episodes of a file, in order. A torn last line is passed over with a warning."""
        for number, (_, line) in enumerate(read_lines(path), start=1):
            try:
                row = parse_json(line, f"{path}: line {number}")
            except ConfigError:
                if not line.endswith(b"\n"):
                    log.warning("%s: line %d is torn and passed over", path, number)
                    return
                raise
            with reading(f"{path}: line {number}"):
                episode = from_json(row)
            yield episode


@contextmanager
def reading(where: str) -> Iterator[None]:
    """What JSON of another shape raises, as one sentence."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where} is not an episode: {type(error).__name__}: {error}") from error


def dumps(row: Mapping[str, Any]) -> str:
    """One line of JSON; what JSON has not becomes the nearest it has."""
    return _line(row).decode("utf-8", "surrogatepass")


def _line(row: Mapping[str, Any]) -> bytes:
    try:  # six times as fast as `json`, most of all for log-probabilities
        return pydantic_core.to_json(row, inf_nan_mode="constants", fallback=_nearest)
    except ValueError:  # half a surrogate pair, or nested too deep
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=_nearest)
        return text.encode("utf-8", "surrogatepass")


def to_json(episode: Episode) -> dict[str, Any]:
    """An episode as plain JSON values; `from_json` gives it back."""
    return {
        "id": episode.id,
        "task": task_to(episode.task),
        "seed": episode.seed,
        "opening": [_message_to(message) for message in episode.opening],
        "turns": [_turn_to(turn) for turn in episode.turns],
        "calls": _calls_to(episode.calls),
        "stop": episode.stop.value,
        "rewards": dict(episode.rewards),
        "metrics": dict(episode.metrics),
        "failure": _failure_to(episode.failure) if episode.failure else None,
        "seconds": episode.seconds,
        "turn_weight": episode.turn_weight,
    } | ({} if episode.weight == 1.0 else {"weight": episode.weight})


def from_json(row: Mapping[str, Any]) -> Episode:
    """The episode that `to_json` made this of."""
    return Episode(
        id=row["id"],
        task=task_from(row["task"]),
        seed=row["seed"],
        opening=tuple(_message_from(message) for message in row["opening"]),
        turns=[_turn_from(turn) for turn in row["turns"]],
        calls=_calls_from(row["calls"]),
        stop=StopReason(row["stop"]),
        rewards=row["rewards"],
        metrics=row["metrics"],
        failure=Failure(**row["failure"]) if row["failure"] else None,
        seconds=row["seconds"],
        turn_weight=row.get("turn_weight", 0.0),
        weight=row.get("weight", 1.0),
    )


# ------------------------------------------------------------------------------------------------ calls


def _calls_to(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Each prompt as `[earlier call or -1, tokens of that call's prompt and completion it repeats, the remaining ids]`.

    A conversation's prompts repeat each other; written out they would grow with the square of its length. Its messages
    are told in the same way, beside the ids.
    """
    rows, spoken = list[dict[str, Any]](), list[tuple[Message, ...]]()
    for number, call in enumerate(calls):
        prompt, said = Tokens(call.prompt), call.completion
        best, repeated = _repeated(prompt, calls[:number])
        row: dict[str, Any] = {} if call.trained else {"trained": False}
        if call.drawn is not None:
            row["drawn"] = list(call.drawn)
        row["messages"], row["reply"] = _spoken_to(call, spoken)
        row["turn"] = call.turn
        row["prompt"] = [best, repeated, prompt.array[repeated:].tolist()]
        row["tokens"], row["logprobs"] = list(map(int, said.tokens)), list(map(float, said.logprobs))
        row["finish"], row["version"], row["seconds"] = said.finish.value, said.version, said.seconds
        if said.versions:
            row["versions"] = list(said.versions)
        if call.top_logprobs:
            row["rivals"] = [_rivals_to(others) for others in call.top_logprobs]
        rows.append(row)
    return rows


def _repeated(prompt: Tokens, earlier: Sequence[Call]) -> tuple[int, int]:
    """The call whose prompt and completion this prompt has most of at its beginning, and how much; -1 for none."""
    if earlier:
        begun, said = Tokens(earlier[-1].prompt), earlier[-1].completion.tokens
        size = len(begun) + len(said)
        if begun.begins(prompt) and tuple(prompt.array[len(begun) : size].tolist()) == tuple(said):
            return len(earlier) - 1, size  # it goes on from the last call, as a conversation does
    shared = [prompt.common(call.whole) for call in earlier]
    repeated = max(shared, default=0)
    return (shared.index(repeated) if repeated else -1), repeated


def _rivals_to(others: Sequence[tuple[int, float]]) -> list[float]:
    """Id and log-probability in turns; three digits are enough to be read."""
    return [number for token, logprob in others for number in (int(token), round(float(logprob), 3))]


def _calls_from(rows: Sequence[Mapping[str, Any]]) -> list[Call]:
    calls, spoken = list[Call](), list[tuple[Message, ...]]()
    for row in rows:
        earlier, repeated, rest = row["prompt"]
        prompt = Tokens(calls[earlier].whole[:repeated]) + rest if earlier >= 0 else Tokens(rest)
        completion = Completion(
            tokens=tuple(row["tokens"]),
            logprobs=tuple(row["logprobs"]),
            finish=FinishReason(row["finish"]),
            version=row["version"],
            seconds=row["seconds"],
            versions=tuple(row.get("versions", ())),
        )
        messages, reply = _spoken_from(row, spoken)
        drawn = SamplingDistribution(*row["drawn"]) if "drawn" in row else None
        rivals = tuple(tuple(zip(flat[::2], flat[1::2], strict=True)) for flat in row.get("rivals", ()))
        calls.append(Call(prompt, completion, row["turn"], row.get("trained", True), messages, reply, drawn, rivals))
    return calls


def _spoken_to(call: Call, spoken: list[tuple[Message, ...]]) -> tuple[list[Any], dict[str, Any] | None]:
    """Its messages as `[earlier call or -1, messages of that call and its reply it repeats, the remaining ones]`, and
    the reply."""
    best, repeated = -1, 0
    for number in reversed(range(len(spoken))):
        shared = _alike(call.messages, spoken[number])
        if shared > repeated:
            best, repeated = number, shared
        if shared and shared == len(spoken[number]):  # it goes on from there, as a conversation does
            break
    spoken.append(call.messages + ((call.reply,) if call.reply else ()))
    new = [_message_to(message) for message in call.messages[repeated:]]
    return [best, repeated, new], _message_to(call.reply) if call.reply else None


def _spoken_from(
    row: Mapping[str, Any], spoken: list[tuple[Message, ...]]
) -> tuple[tuple[Message, ...], Message | None]:
    """What `_spoken_to` told; files of before have none."""
    earlier, repeated, new = row.get("messages", (-1, 0, ()))
    known = spoken[earlier][:repeated] if earlier >= 0 else ()
    messages = known + tuple(_message_from(message) for message in new)
    reply = _message_from(row["reply"]) if row.get("reply") else None
    spoken.append(messages + ((reply,) if reply else ()))
    return messages, reply


def _alike(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Length of the common beginning. The messages of one conversation are mostly the very same objects."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next((at for at in range(size) if one[at] != other[at]), size)


# ------------------------------------------------------------------------------------------------ the rest


def task_to(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "messages": [_message_to(message) for message in task.messages],
        "fields": _plain(dict(task.fields)),
        "source": task.source,
        "agent": task.agent,
        "env": task.env,
        "seed": task.seed,
    }


def task_from(row: Mapping[str, Any]) -> Task:
    return Task(**{**row, "messages": tuple(_message_from(message) for message in row["messages"])})


def _turn_to(turn: Turn) -> dict[str, Any]:
    return {
        "message": _message_to(turn.message),
        "observation": [_message_to(message) for message in turn.observation],
        "reward": turn.reward,
        "state_key": turn.state_key,
        "info": dict(turn.info),
    }


def _turn_from(row: Mapping[str, Any]) -> Turn:
    observation = tuple(_message_from(message) for message in row["observation"])
    return Turn(**{**row, "message": _message_from(row["message"]), "observation": observation})


def _message_to(message: Message) -> dict[str, Any]:
    """OpenAI's shape; what says nothing is left out."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": _plain(dict(call.arguments)), "error": call.error}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        row["name"] = message.name
    if message.sampled:
        row["sampled"] = True
    return row


def _message_from(row: Mapping[str, Any]) -> Message:
    return Message(**{**row, "tool_calls": tuple(ToolCall(**call) for call in row.get("tool_calls", ()))})


def _failure_to(failure: Failure) -> dict[str, Any]:
    return {
        "where": failure.where,
        "kind": failure.kind,
        "message": failure.message,
        "traceback": failure.traceback,
    }


def _plain(value: Any) -> Any:
    """The value, where it is plain JSON; else as `json` would write it, and not `pydantic_core`."""
    return value if _is_plain(value) else json.loads(json.dumps(value, default=_nearest))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if kind is list else kind in SCALARS


def _nearest(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return str(value)
