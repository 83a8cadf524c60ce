"""Episode files: every episode of a step, one JSON object per line; and recordings of training batches.

Viewer, evaluation, replay and debugging read the same format. Floats are exact; non-finite numbers are written as
`NaN` and `-Infinity`. Values of a task that JSON lacks are converted (a tuple to a list, an array to lists, others to
text).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

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
MAX_GROUPS = 1_000_000
EPISODE_FILE = re.compile(r"step-(\d{1,12})\.jsonl", re.ASCII)


class EpisodeStore:
    """A folder of episode files, one for each step.

    Example:
        store = EpisodeStore(folder / "episodes")
        path = store.write(12, groups)                 # episodes/step-000012.jsonl
        rewards = [episode.reward for episode in store.read(path)]
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """Write the episodes of a step atomically. Writing a step again replaces the file. Each line has the number of
        its group, the number of groups, and the reward of the group's greedy episode if there is one."""
        path = self.path(step)
        with atomic_file(path) as file:
            for number, group in enumerate(groups):
                place: dict[str, Any] = {"group": number, "groups": len(groups)}
                place |= {} if group.greedy is None else {"greedy": group.greedy}
                file.writelines(_line(episode_to_json(episode) | place) + b"\n" for episode in group.episodes)
        return path

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06}.jsonl"

    def paths(self) -> list[Path]:
        files = [Path(entry.path) for entry in entries_of(self.folder) if EPISODE_FILE.fullmatch(entry.name)]
        return sorted(files, key=lambda path: int(path.stem.removeprefix("step-")))

    @staticmethod
    def read(path: Path) -> Iterator[Episode]:
        """The episodes of a file, in order. An incomplete last line is skipped with a warning."""
        return (episode for _, episode in EpisodeStore._rows(path))

    @staticmethod
    def read_groups(path: Path) -> list[Group]:
        """The groups of a file, in order; groups without episodes are empty. In files that do not name the groups,
        successive episodes of one task are a group."""
        groups: dict[int, Group] = {}
        size, number, seen = 0, -1, set[str]()
        for row, episode in EpisodeStore._rows(path):
            with episode_errors(str(path)):
                last = groups.get(number)
                if "group" in row:
                    number, size = int(row["group"]), int(row["groups"])
                    if not 0 <= number < size <= MAX_GROUPS:
                        raise ValueError(f"group {number} of {size}")
                elif last is None or last.task != episode.task or episode.id in seen:
                    number, seen = number + 1, set()
                seen.add(episode.id)
                groups.setdefault(number, Group(episode.task, [], row.get("greedy"))).episodes.append(episode)
        return [groups.get(at) or Group(Task(""), []) for at in range(max(size, max(groups, default=-1) + 1))]

    @staticmethod
    def _rows(path: Path) -> Iterator[tuple[Mapping[str, Any], Episode]]:
        for number, (_, line) in enumerate(read_lines(path), start=1):
            try:
                row = parse_json(line, f"{path}: line {number}")
            except ConfigError:
                if not line.endswith(b"\n"):
                    log.warning("%s: line %d is incomplete and skipped", path, number)
                    return
                raise
            with episode_errors(f"{path}: line {number}"):
                episode = episode_from_json(row)
            yield row, episode


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` when it is complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def episode_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where} is not an episode: {type(error).__name__}: {error}") from error


def json_line(row: Mapping[str, Any]) -> str:
    return _line(row).decode("utf-8", "surrogatepass")


def _line(row: Mapping[str, Any]) -> bytes:
    try:  # six times as fast as `json`, because of the log-probabilities
        return pydantic_core.to_json(row, inf_nan_mode="constants", fallback=_to_json_value)
    except ValueError:  # a lone surrogate, or nested too deep
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=_to_json_value)
        return text.encode("utf-8", "surrogatepass")


def episode_to_json(episode: Episode) -> dict[str, Any]:
    """An episode as JSON values; the inverse of `episode_from_json`."""
    return {
        "id": episode.id,
        "task": task_to_json(episode.task),
        "seed": episode.seed,
        "opening": [_message_to(message) for message in episode.opening],
        "turns": [_turn_to(turn) for turn in episode.turns],
        "calls": _calls_to(episode.calls),
        "stop": episode.stop.value,
        "rewards": dict(episode.rewards),
        "metrics": dict(episode.metrics),
        "failure": dataclasses.asdict(episode.failure) if episode.failure else None,
        "seconds": episode.seconds,
        "turn_weight": episode.turn_weight,
    } | ({} if episode.weight == 1.0 else {"weight": episode.weight})


def episode_from_json(row: Mapping[str, Any]) -> Episode:
    return Episode(
        id=row["id"],
        task=task_from_json(row["task"]),
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
    """Each prompt as `[earlier call or -1, length of the shared prefix with that call's tokens, remaining ids]`.
    Written in full, the prompts of a conversation would grow with the square of its length. The messages are written in
    the same way."""
    rows, earlier_messages = list[dict[str, Any]](), list[tuple[Message, ...]]()
    for number, call in enumerate(calls):
        prompt, completion = Tokens(call.prompt), call.completion
        best, repeated = _longest_shared_prefix(prompt, calls[:number])
        row: dict[str, Any] = {} if call.trained else {"trained": False}
        if call.drawn is not None:
            row["drawn"] = list(call.drawn)
        if call.schema:
            row["schema"] = call.schema
        row["messages"], row["reply"] = _messages_to(call, earlier_messages)
        row["turn"] = call.turn
        row["prompt"] = [best, repeated, prompt.array[repeated:].tolist()]
        row["tokens"], row["logprobs"] = list(map(int, completion.tokens)), list(map(float, completion.logprobs))
        row["finish"], row["version"], row["seconds"] = completion.finish.value, completion.version, completion.seconds
        if completion.versions:
            row["versions"] = list(completion.versions)
        if call.top_logprobs:
            row["rivals"] = [_alternatives_to(others) for others in call.top_logprobs]
        rows.append(row)
    return rows


def _longest_shared_prefix(prompt: Tokens, earlier: Sequence[Call]) -> tuple[int, int]:
    """The earlier call that shares the longest prefix with this prompt, or -1, and the length of that prefix."""
    if earlier:
        start, sampled = Tokens(earlier[-1].prompt), earlier[-1].completion.tokens
        size = len(start) + len(sampled)
        if start.begins(prompt) and tuple(prompt.array[len(start) : size].tolist()) == tuple(sampled):
            return len(earlier) - 1, size  # it extends the last call
    shared = [prompt.common(call.whole) for call in earlier]
    repeated = max(shared, default=0)
    return (shared.index(repeated) if repeated else -1), repeated


def _alternatives_to(others: Sequence[tuple[int, float]]) -> list[float]:
    """Alternating token ids and log-probabilities, rounded to three digits."""
    return [number for token, logprob in others for number in (int(token), round(float(logprob), 3))]


def _calls_from(rows: Sequence[Mapping[str, Any]]) -> list[Call]:
    calls, earlier_messages = list[Call](), list[tuple[Message, ...]]()
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
        messages, reply = _messages_from(row, earlier_messages)
        drawn = SamplingDistribution(*row["drawn"]) if "drawn" in row else None
        rivals = tuple(tuple(zip(flat[::2], flat[1::2], strict=True)) for flat in row.get("rivals", ()))
        trained, schema = row.get("trained", True), row.get("schema", "")
        calls.append(Call(prompt, completion, row["turn"], trained, messages, reply, drawn, rivals, schema))
    return calls


def _messages_to(call: Call, earlier_messages: list[tuple[Message, ...]]) -> tuple[list[Any], dict[str, Any] | None]:
    """The messages as `[earlier call or -1, number of shared messages, remaining messages]`, and the reply."""
    best, repeated = -1, 0
    for number in reversed(range(len(earlier_messages))):
        shared = _common_prefix(call.messages, earlier_messages[number])
        if shared > repeated:
            best, repeated = number, shared
        if shared and shared == len(earlier_messages[number]):  # it extends that call
            break
    earlier_messages.append(call.messages + ((call.reply,) if call.reply else ()))
    new = [_message_to(message) for message in call.messages[repeated:]]
    return [best, repeated, new], _message_to(call.reply) if call.reply else None


def _messages_from(
    row: Mapping[str, Any], earlier_messages: list[tuple[Message, ...]]
) -> tuple[tuple[Message, ...], Message | None]:
    """The inverse of `_messages_to`; old files have no messages."""
    earlier, repeated, new = row.get("messages", (-1, 0, ()))
    known = earlier_messages[earlier][:repeated] if earlier >= 0 else ()
    messages = known + tuple(_message_from(message) for message in new)
    reply = _message_from(row["reply"]) if row.get("reply") else None
    earlier_messages.append(messages + ((reply,) if reply else ()))
    return messages, reply


def _common_prefix(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Length of the common prefix. Messages of one conversation are mostly the same objects, so `==` is fast."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next((at for at in range(size) if one[at] != other[at]), size)


# ---------------------------------------------------------------------------------------------- tasks and messages


def task_to_json(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "messages": [_message_to(message) for message in task.messages],
        "fields": _plain(dict(task.fields)),
        "source": task.source,
        "agent": task.agent,
        "env": task.env,
        "seed": task.seed,
    }


def task_from_json(row: Mapping[str, Any]) -> Task:
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
    """OpenAI's format without empty fields."""
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


def _plain(value: Any) -> Any:
    """The value if it is plain JSON, else its conversion by `json`."""
    return value if _is_plain(value) else json.loads(json.dumps(value, default=_to_json_value))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if kind is list else kind in SCALARS


def _to_json_value(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return str(value)


# ------------------------------------------------------------------------------------------------ recorded batches

PlayBatch = Callable[[], Awaitable[list[Group]]]
EMPTY_GROUP = Group(Task(""), [])
"""Written for a batch without groups."""


class BatchRecording(Protocol):
    """Records training batches, or replays them. The file has one line of JSON per group: the seed of its batch, its
    number, the number of groups of the batch and its episodes. An incomplete batch does not count. If a resumed run
    writes a batch again, the last one counts."""

    async def batch(self, seed: int, tasks: Sequence[Task], play: PlayBatch) -> list[Group]: ...


class RolloutRecorder:
    def __init__(self, path: Path):
        self.path = path

    async def batch(self, seed: int, tasks: Sequence[Task], play: PlayBatch) -> list[Group]:
        groups = await play()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
            for number, group in enumerate(groups or [EMPTY_GROUP]):
                head: dict[str, Any] = {"batch": seed, "group": number, "of": len(groups), "task": group.task.id}
                episodes = [episode_to_json(episode) for episode in group.episodes]
                file.write(json_line(head | {"episodes": episodes}) + "\n")
        return groups


class RolloutReplay:
    """Replays recorded batches (`rollout.replay`). Only the offsets of the lines are kept in memory."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise ConfigError(f"rollout.replay: {path} is no file. Write rollout.record={path} to make it.")
        self.path = path
        self.batches: dict[int, list[int]] = {}
        """Seed of a batch -> offsets of its lines."""
        started: dict[int, list[int]] = {}
        with path.open("rb") as file:
            while True:
                offset, line = file.tell(), file.readline()
                if not line.endswith(b"\n"):  # the end, or an incomplete line of a killed run
                    return
                seed, number, of = _line_head(path, line)
                offsets = started[seed] = [*(started.get(seed, []) if number else []), offset]
                if len(offsets) == max(of, 1):
                    self.batches[seed] = offsets

    async def batch(self, seed: int, tasks: Sequence[Task], play: PlayBatch) -> list[Group]:
        if seed not in self.batches:
            raise ConfigError(
                f"rollout.replay: {self.path} holds {len(self.batches)} batches and not this one: they were recorded "
                "with another seed or for fewer steps. Write the seed and the steps of that run."
            )
        by_id = {task.id: task for task in tasks}
        groups = []
        with self.path.open("rb") as file:
            for offset in self.batches[seed]:
                file.seek(offset)
                with episode_errors(f"rollout.replay: {self.path}: the line at byte {offset}"):
                    row = json.loads(file.readline().decode("utf-8", "surrogatepass"))
                    if row["of"] == 0:
                        break
                    if row["task"] not in by_id:
                        raise ConfigError(
                            f"rollout.replay: {self.path} was recorded with other tasks ({row['task']}, …) than this "
                            f"run has ({', '.join(list(by_id)[:2])}, …). Use the data and the environment of that run."
                        )
                    groups.append(Group(by_id[row["task"]], [episode_from_json(one) for one in row["episodes"]]))
        return groups


def _line_head(path: Path, line: bytes) -> tuple[int, int, int]:
    """Batch, group and number of groups, without parsing the episodes."""
    try:
        head = json.loads(line[: line.index(b',"episodes"')] + b"}")
        return head["batch"], head["group"], head["of"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"rollout.replay: {path} is not a recording of rollouts. Make one with rollout.record."
        ) from error
