"""A source of a mixture: an endless stream of tasks, by their place in it."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np

from arborl.data.mixing.order import RowOrder
from arborl.data.reading.rows import RowReader, content_hash
from arborl.data.reading.splits import EVALUATION_SEED, PromptFilters, Split
from arborl.data.reading.tables import Row, Table
from arborl.data.source import env_task, held_out_seed
from arborl.errors import ConfigError
from arborl.seeds import derive
from arborl.types import Task

log = logging.getLogger(__name__)

NEIGHBOURS = 16
"""Rows of which one may stand in for a row that turns out not to be a task."""


class TaskPool(Protocol):
    """Tasks of one source."""

    name: str
    size: int | None
    """Tasks of a pass; None where none comes twice."""
    counts: Counter[str]
    """What filters did, and what turned out to be wrong while training."""

    def take(self, start: int, count: int) -> list[Task]:
        """The tasks at these places of the stream; the same for the same arguments."""
        ...

    def evaluation(self, count: int) -> list[Task]:
        """At most `count` tasks that `take` never gives; the same for every run seed."""
        ...


class RowPool:
    """Rows of a table.

    Args:
        table: where the rows are.
        reader: makes tasks of them.
        split: which rows are trained on, and which are held out.
        seed: the run's.
        filters: cuts prompts that are too long.
        held_out: held-out rows of another table, in place of the split's.
        shuffle: come in a new order every pass.
    """

    def __init__(
        self,
        table: Table,
        reader: RowReader,
        split: Split,
        seed: int,
        filters: PromptFilters | None = None,
        held_out: tuple[Table, Split] | None = None,
        shuffle: bool = True,
    ):
        self.name, self.table, self.reader, self.split = reader.source, table, reader, split
        self.filters, self.seed = filters or PromptFilters(), seed
        self.order = RowOrder(split.training, derive(seed, "order", self.name), table.window, shuffle)
        self.size: int | None = self.order.size
        self.counts = split.counts.copy()
        self._held_out = held_out
        self._ahead: tuple[int, list[tuple[int, Row]]] = (0, [])

    def take(self, start: int, count: int) -> list[Task]:
        return [
            self._task(row, self.split.name(number), seed) or self._instead(place, seed, number, row)
            for place, seed, (number, row) in zip(
                range(start, start + count), self._seeds(start, count), self._rows(start, count), strict=True
            )
        ]

    def _rows(self, start: int, count: int) -> list[tuple[int, Row]]:
        """Rows at these places of the stream, with their numbers. Some more are read along, which costs little."""
        begin = start - self._ahead[0]
        if begin < 0 or begin + count > len(self._ahead[1]):
            numbers = self.order.numbers(start, max(count, self.table.ahead))
            self._ahead = start, list(zip(numbers.tolist(), self.table.rows(numbers), strict=True))
            begin = 0
        return self._ahead[1][begin : begin + count]

    def _seeds(self, start: int, count: int) -> list[int]:
        """A seed for each place, all but surely different (the finaliser of SplitMix64)."""
        places = np.arange(start, start + count, dtype=np.uint64)
        mixed = np.uint64(derive(self.seed, "task", self.name)) + places * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        seeds: list[int] = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)).tolist()
        return seeds

    def evaluation(self, count: int) -> list[Task]:
        table, split = self._held_out or (self.table, self.split)
        if self._held_out is None:
            numbers = split.held_out[:count]
        else:
            order = RowOrder(split.training, derive(EVALUATION_SEED, self.name), table.window)
            numbers = order.numbers(0, min(count, order.size))
        rows = zip(numbers.tolist(), table.rows(numbers), strict=True)
        tasks = (
            self._task(row, split.name(number), derive(EVALUATION_SEED, "evaluation", i))
            for i, (number, row) in enumerate(rows)
        )
        return [task for task in tasks if task is not None]

    def agents(self) -> set[str]:
        """Names of agents in the rows of a table that is in memory."""
        if not self.table.whole:
            return set()
        numbers = [number for block in range(len(self.table.sizes)) for number in self.split.training.of(block)]
        column = self.reader.fields.get("agent", "agent_name")
        return {str(row[column]) for row in self.table.rows(numbers) if row.get(column)}

    def _task(self, row: Row, name: str, seed: int) -> Task | None:
        """The row as a task; None where it is none, which only rows that were not looked at before can be."""
        try:
            task = self.reader.task(row, "", name, seed)
            return None if self._too_long(task) else self.filters.cut(task) if self.filters.max_tokens else task
        except (ConfigError, ValueError):
            return None

    def _too_long(self, task: Task) -> bool:
        """Whether a given row is too long, where nobody has looked before."""
        late = self.filters.whole is not None and not self.table.whole and self.filters.overlong == "drop"
        return late and self.filters.too_long(task) > 0

    def _instead(self, place: int, seed: int, number: int, row: Row) -> Task:
        """A task that comes soon after, for a row that is none: one bad row of millions must not end a run."""
        where = f"{self.table.where}, {self.table.place(number)}"
        try:
            self._too_long(self.reader.task(row, where))
            self.counts["overlong"] += 1
            why = ConfigError(f"{where}, and {NEIGHBOURS} after it: too long. Write a larger sampling.max_context.")
        except (ConfigError, ValueError) as error:
            self.counts["bad"] += 1
            why = error if isinstance(error, ConfigError) else ConfigError(f"{where}: {error}")
            log.warning("%s A row that comes soon after is taken instead.", why)
        near = self.order.numbers(place + 1, NEIGHBOURS)
        for other, row in zip(near.tolist(), self.table.rows(near), strict=True):
            if task := self._task(row, self.split.name(other), seed):
                return task
        raise why


class EnvPool:
    """Tasks that an environment makes, from their seeds."""

    size: int | None = None

    def __init__(self, name: str, env: str, seed: int):
        self.name, self.env, self.seed = name, env, seed
        self.counts: Counter[str] = Counter()

    def take(self, start: int, count: int) -> list[Task]:
        return [
            env_task(self.env, self.name, "train", f"{place:06d}", derive(self.seed, "task", self.name, place))
            for place in range(start, start + count)
        ]

    def evaluation(self, count: int) -> list[Task]:
        return [env_task(self.env, self.name, "held_out", f"{i:06d}", held_out_seed(i)) for i in range(count)]


class StreamPool:
    """Rows of a function that never ends, as they come. Going back starts it again.

    Args:
        make: gives the rows; told the run's seed where it takes a `seed`.
        reader: makes tasks of them.
        seed: the run's.
        share: of the rows, by a hash of their content, that is held out.
        filters: which prompts count.
    """

    size: int | None = None

    def __init__(
        self,
        make: Callable[..., Iterable[Row]],
        reader: RowReader,
        seed: int,
        share: float = 0.1,
        filters: PromptFilters | None = None,
    ):
        self.name, self.make, self.reader, self.seed = reader.source, make, reader, seed
        self.limit, self.filters = int(share * 2**64), filters or PromptFilters()
        self.counts: Counter[str] = Counter()
        self._at, self._stream = 0, self._tasks()

    def take(self, start: int, count: int) -> list[Task]:
        if start < self._at:
            self._at, self._stream = 0, self._tasks()
        for _ in range(self._at, start):
            next(self._stream)
        self._at = start + count
        tasks = [next(self._stream) for _ in range(count)]
        return [replace(task, seed=derive(self.seed, "task", self.name, start + i)) for i, task in enumerate(tasks)]

    def evaluation(self, count: int) -> list[Task]:
        rows = islice(call_rows(self.make, EVALUATION_SEED), 1_000 * (count + 1))
        tasks = list(islice(self._read(rows, held_out=True), count))  # fewer where hardly any row is held out
        return [replace(task, seed=derive(EVALUATION_SEED, "evaluation", i)) for i, task in enumerate(tasks)]

    def _tasks(self) -> Iterator[Task]:
        yield from self._read(call_rows(self.make, self.seed), held_out=False)
        raise ConfigError(f"{self._where}: the rows ended, though endless is set. Write endless=false.")

    @property
    def _where(self) -> str:
        return f"data.sources.{self.name}.rows"

    def _read(self, rows: Iterable[Row], held_out: bool) -> Iterator[Task]:
        """The tasks of one side that count."""
        for number, row in enumerate(rows, 1):
            if (content_hash(row) < self.limit) is not held_out:
                continue
            where = f"{self._where}, row {number}"
            task = self.reader.task(row, where)
            if tokens := self.filters.too_long(task):
                if self.filters.overlong == "refuse":
                    raise ConfigError(f"{where}: the prompt has {tokens} tokens. Raise max_prompt_tokens.")
                self.counts["cut" if self.filters.overlong == "cut" else "overlong"] += 1
                if self.filters.overlong == "drop":
                    continue
            yield self.filters.cut(task)


def call_rows(make: Callable[..., Iterable[Row]], seed: int) -> Iterator[Row]:
    """The rows of a function, called with the seed where it takes one that its arguments do not give."""
    takes: Any = inspect.signature(make).parameters
    given = isinstance(make, partial) and "seed" in make.keywords
    return iter(make(seed=seed) if "seed" in takes and not given else make())
