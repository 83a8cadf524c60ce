"""Rollouts on file: played once, trained on as often as one likes.

One line a group, in JSON: which batch it belongs to (the batch's seed), its place there, how many groups the batch has,
and its episodes as the episode files have them. A batch that was not written to its end does not count, and one that
was written again (by a run that was resumed) counts as it was written last.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from arborl.errors import ConfigError
from arborl.rollout.store import dumps, from_json, reading, to_json
from arborl.types import Group, Task

Batch = Callable[[], Awaitable[list[Group]]]
NOTHING = Group(Task(""), [])
"""Stands in the file for the groups of a batch that has none."""


class Tape(Protocol):
    """Stands between the trainer and the playing of a batch."""

    async def batch(self, seed: int, tasks: Sequence[Task], play: Batch) -> list[Group]:
        """The groups of the batch with this seed."""
        ...


class Recording:
    """Plays, and writes what was played."""

    def __init__(self, path: Path):
        self.path = path

    async def batch(self, seed: int, tasks: Sequence[Task], play: Batch) -> list[Group]:
        groups = await play()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
            for number, group in enumerate(groups or [NOTHING]):
                head: dict[str, Any] = {"batch": seed, "group": number, "of": len(groups), "task": group.task.id}
                file.write(dumps(head | {"episodes": [to_json(episode) for episode in group.episodes]}) + "\n")
        return groups


class Replay:
    """Plays nothing: gives what a recording has for the batch.

    Only where each batch begins is kept; its lines are read when it is asked for.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise ConfigError(f"rollout.replay: {path} is no file. Write rollout.record={path} to make it.")
        self.path = path
        self.batches: dict[int, list[int]] = {}
        """Where the lines of each batch begin."""
        self._index()

    def _index(self) -> None:
        begun: dict[int, list[int]] = {}
        with self.path.open("rb") as file:
            while True:
                place, line = file.tell(), file.readline()
                if not line.endswith(b"\n"):  # the end, or a line that was torn when its run was killed
                    return
                seed, number, of = _head(self.path, line)
                places = begun[seed] = [*(begun.get(seed, []) if number else []), place]
                if len(places) == max(of, 1):
                    self.batches[seed] = places

    async def batch(self, seed: int, tasks: Sequence[Task], play: Batch) -> list[Group]:
        if seed not in self.batches:
            raise ConfigError(
                f"rollout.replay: {self.path} holds {len(self.batches)} batches, and this one is not among them: they "
                "were recorded with another seed, or for fewer steps. Write the seed and the steps of that run."
            )
        by_name = {task.id: task for task in tasks}
        groups = []
        with self.path.open("rb") as file:
            for place in self.batches[seed]:
                file.seek(place)
                with reading(f"rollout.replay: {self.path}: what lies at byte {place}"):
                    row = json.loads(file.readline().decode("utf-8", "surrogatepass"))
                    if row["of"] == 0:
                        break
                    if row["task"] not in by_name:
                        raise ConfigError(
                            f"rollout.replay: {self.path} was recorded on other tasks ({row['task']}, …) than this run "
                            f"has ({', '.join(list(by_name)[:2])}, …). Write the data and the environment of that run."
                        )
                    groups.append(Group(by_name[row["task"]], [from_json(one) for one in row["episodes"]]))
        return groups


def _head(path: Path, line: bytes) -> tuple[int, int, int]:
    """Batch, group and number of groups, without reading the episodes."""
    try:
        head = json.loads(line[: line.index(b',"episodes"')] + b"}")
        return head["batch"], head["group"], head["of"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"rollout.replay: {path} is no recording of rollouts. Make one with rollout.record."
        ) from error
