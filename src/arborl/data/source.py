"""Sources of tasks. `take` is a pure function of the seed and the step, so a resumed run needs no state."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from arborl.data.files import read_rows
from arborl.data.rows import content_hash, read_task
from arborl.seeds import derive, generator
from arborl.types import Task

EVALUATION_SEED = 0
"""Held-out tasks come from this and not from the run's seed: runs are then compared on the same tasks."""


class TaskSource(Protocol):
    """Where tasks come from."""

    def take(self, step: int, count: int) -> list[Task]:
        """The tasks of one training step; the same for the same arguments, in whatever order steps are asked for."""
        ...

    def evaluation(self, count: int) -> list[Task]:
        """At most `count` tasks that `take` never gives; the same for every run seed."""
        ...


class EnvTasks(TaskSource):
    """Tasks the environment makes itself, from their seeds.

    Args:
        env: name of the environment.
        seed: the run's.
    """

    def __init__(self, env: str, seed: int):
        self.env, self.seed = env, seed

    def take(self, step: int, count: int) -> list[Task]:
        return [
            self._task(f"train/{step:06d}-{i:03d}", "train", derive(self.seed, "task", step, i)) for i in range(count)
        ]

    def evaluation(self, count: int) -> list[Task]:
        return [
            self._task(f"held_out/{i:03d}", "held_out", derive(EVALUATION_SEED, "evaluation", i)) for i in range(count)
        ]

    def _task(self, name: str, split: str, seed: int) -> Task:
        return Task(f"{self.env}/{name}", source=self.env, env=self.env, fields={"split": split}, seed=seed)


class FileTasks(TaskSource):
    """The rows of a file, in a new order every pass.

    A row's content decides whether it is held out, so rows may be added or moved and none changes sides. Where a small
    file leaves one side empty, the row nearest to it is put there.

    Args:
        path: JSON list, JSONL, CSV or Parquet.
        question: column that holds the problem; a column `messages` in OpenAI's shape is taken before it.
        seed: the run's.
        evaluation_share: share of the rows that is held out.
    """

    def __init__(self, path: str | Path, question: str = "question", seed: int = 0, evaluation_share: float = 0.1):
        self.path, self.seed = Path(path), seed
        rows = read_rows(self.path)
        tasks = [
            (content_hash(row), read_task(row, question, f"{path}, {place}", self.path.stem)) for place, row in rows
        ]
        limit = _limit([digest for digest, _ in tasks], evaluation_share)
        self.training = [task for digest, task in tasks if digest >= limit]
        self.held_out = [task for digest, task in sorted(tasks, key=lambda pair: pair[0]) if digest < limit]
        self._order: tuple[int, np.ndarray] | None = None

    def take(self, step: int, count: int) -> list[Task]:
        seen: Counter[str] = Counter()
        tasks = []
        for position in range(step * count, (step + 1) * count):
            task = self._at(position)
            seen[task.id] += 1
            if seen[task.id] > 1:  # a batch longer than the file: its tasks still have names of their own
                task = replace(task, id=f"{task.id}#{seen[task.id]}")
            tasks.append(replace(task, seed=derive(self.seed, "task", position)))
        return tasks

    def evaluation(self, count: int) -> list[Task]:
        return [
            replace(task, seed=derive(EVALUATION_SEED, "evaluation", i)) for i, task in enumerate(self.held_out[:count])
        ]

    def _at(self, position: int) -> Task:
        """The task at this place in the endless stream of passes."""
        number, index = divmod(position, len(self.training))
        if self._order is None or self._order[0] != number:  # only a cache: an order follows from its number
            self._order = number, generator(self.seed, "pass", number).permutation(len(self.training))
        return self.training[int(self._order[1][index])]


def _limit(digests: list[int], share: float) -> int:
    """Rows with a hash below this are held out: the share of all hashes, moved where it would leave a side empty."""
    low, high = min(digests), max(digests)
    return min(max(int(share * 2**64), low + 1), high)  # one row alone is trained on
