"""Tasks of one source as an endless stream, by position; and the order of rows within a pass.

Rows are read in blocks (row groups of Parquet), so random access is expensive. The order of the blocks is shuffled, and
rows are shuffled within windows of neighbouring blocks. A pass is still a permutation of all rows.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np

from arborl.data.reading.row_reader import RowReader, content_hash
from arborl.data.reading.tables import Row, Table
from arborl.data.reading.train_splits import (
    EVALUATION_SEED,
    PromptFilters,
    RowNumbers,
    SelectedRows,
    Split,
    spread_rows,
)  # fmt: skip
from arborl.data.task_source import env_task, held_out_seed
from arborl.errors import ConfigError
from arborl.seeds import derive, generator
from arborl.types import Ints, Task

WINDOW = 65_536
"""Rows that are shuffled together."""
TINY = 16
"""With fewer rows two passes could be equal by chance."""


def permutation(size: int, seed: int, number: int) -> Ints:
    """The order of a pass. With few rows each comes first in turn, so consecutive passes differ."""
    order: Ints = generator(seed, "pass", number).permutation(size)
    if 1 < size < TINY:
        lead = generator(seed, "lead").permutation(size)[number % size]
        order = np.concatenate([[lead], order[order != lead]])
    return order


class RowOrder:
    """The endless stream of the rows of a view."""

    def __init__(self, view: SelectedRows | RowNumbers, seed: int, window: int = WINDOW, shuffle: bool = True):
        self.view, self.seed, self.window, self.shuffle = view, seed, window, shuffle
        self.size = int(view.sizes.sum())
        self._pass: tuple[int, list[Ints], Ints] | None = None
        self._rows: tuple[int, int, Ints] | None = None

    def numbers(self, start: int, count: int) -> Ints:
        parts: list[Ints] = []
        while count > 0:
            number, at = divmod(start, self.size)
            windows, ends = self._windows(number)
            index = int(np.searchsorted(ends, at, side="right"))
            rows = self._window(number, index, windows[index])
            begin = at - (int(ends[index - 1]) if index else 0)
            part = rows[begin : begin + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _windows(self, number: int) -> tuple[list[Ints], Ints]:
        """The blocks of each window of a pass, and where each window ends."""
        if self._pass is None or self._pass[0] != number:  # a cache: the pass follows from its number
            order = self._blocks(number)
            sizes = self.view.sizes[order]
            cuts = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // self.window)) + 1
            ends = np.cumsum([part.sum() for part in np.split(sizes, cuts)])
            self._pass = number, np.split(order, cuts), ends
        return self._pass[1], self._pass[2]

    def _blocks(self, number: int) -> Ints:
        if not self.shuffle:
            return np.flatnonzero(self.view.sizes > 0)
        runs = self.view.runs
        first = np.cumsum(runs) - runs
        shuffled = permutation(len(runs), self.seed, number) if len(runs) > 1 else np.zeros(1, np.int64)
        order = np.concatenate([np.arange(first[run], first[run] + runs[run]) for run in shuffled])
        return order[self.view.sizes[order] > 0]

    def _window(self, number: int, index: int, blocks: Iterable[int]) -> Ints:
        if self._rows is None or self._rows[:2] != (number, index):
            rows = np.concatenate([self.view.of(int(block)) for block in blocks])
            seed = self.seed if len(rows) == self.size else generator(self.seed, "window", index).integers(2**62)
            self._rows = number, index, rows[permutation(len(rows), int(seed), number)] if self.shuffle else rows
        return self._rows[2]


# ------------------------------------------------------------------------------------------------ pools

log = logging.getLogger(__name__)

NEIGHBOURS = 16
"""Following rows that may replace an invalid row."""


class TaskPool(Protocol):
    """Tasks of one source."""

    name: str
    size: int | None
    """Tasks of a pass; None if no task repeats."""
    counts: Counter[str]
    """Filtered and invalid rows by reason."""

    def take(self, start: int, count: int) -> list[Task]:
        """The tasks at these positions of the stream; a function of its arguments."""
        ...

    def evaluation(self, count: int) -> list[Task]:
        """At most `count` held-out tasks, which `take` never returns; the same for every run seed."""
        ...


@dataclass(frozen=True, slots=True)
class RowSample:
    """Tasks of a table that are checked before a run."""

    where: str
    """Name of the table."""
    tasks: list[Task]
    is_whole: bool
    """Whether these are all rows that are used."""

    def every(self, step: int) -> RowSample:
        return replace(self, tasks=self.tasks[::step], is_whole=self.is_whole and step == 1)

    def share(self, count: int) -> str:
        return f"{count:,} of {len(self.tasks):,} {'rows' if self.is_whole else 'rows that were checked'}"


class RowPool:
    """Rows of a table."""

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
            self._task(row, self.split.name(number), seed) or self._replacement(place, seed, number, row)
            for place, seed, (number, row) in zip(
                range(start, start + count), self._seeds(start, count), self._rows(start, count), strict=True
            )
        ]

    def _rows(self, start: int, count: int) -> list[tuple[int, Row]]:
        """Rows at these positions with their numbers. Some more are read ahead."""
        begin = start - self._ahead[0]
        if begin < 0 or begin + count > len(self._ahead[1]):
            numbers = self.order.numbers(start, max(count, self.table.ahead))
            self._ahead = start, list(zip(numbers.tolist(), self.table.rows(numbers), strict=True))
            begin = 0
        return self._ahead[1][begin : begin + count]

    def _seeds(self, start: int, count: int) -> list[int]:
        """A seed for each position (the finalizer of SplitMix64)."""
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

    def samples(self, count: int) -> list[RowSample]:
        """At most `count` rows of the table from evenly spaced places, and of the table of held-out rows if there is
        one, to check them before a run."""
        tables = [(self.table, self.split), *([self._held_out] if self._held_out is not None else [])]
        return [self._sample(table, split, count) for table, split in tables]

    def _sample(self, table: Table, split: Split, count: int) -> RowSample:
        if isinstance(split.training, SelectedRows):
            view = SelectedRows(table, np.concatenate([split.training.numbers, split.held_out]))
            numbers = view.numbers[np.linspace(0, len(view.numbers) - 1, min(count, len(view.numbers))).astype(int)]
        else:
            numbers = spread_rows(RowNumbers(table, 0.0, held_out=False), count)
        rows = zip(numbers.tolist(), table.rows(numbers), strict=True)
        tasks = [task for number, row in rows if (task := self._task(row, split.name(number), 0)) is not None]
        return RowSample(table.where, tasks, is_whole=len(numbers) == int(table.sizes.sum()) - split.counts.total())

    def agents(self) -> set[str]:
        """Names of agents in the rows of a table in memory."""
        if not self.table.whole:
            return set()
        numbers = [number for block in range(len(self.table.sizes)) for number in self.split.training.of(block)]
        column = self.reader.fields.get("agent", "agent_name")
        return {str(row[column]) for row in self.table.rows(numbers) if row.get(column)}

    def _task(self, row: Row, name: str, seed: int) -> Task | None:
        """The row as a task; None if it is invalid, which is possible only in tables that were not scanned."""
        try:
            task = self.reader.task(row, "", name, seed)
            return None if self._too_long(task) else self.filters.cut(task)
        except (ConfigError, ValueError):
            return None

    def _too_long(self, task: Task) -> bool:
        late = self.filters.whole is not None and not self.table.whole and self.filters.overlong == "drop"
        return late and self.filters.too_long(task) > 0

    def _replacement(self, place: int, seed: int, number: int, row: Row) -> Task:
        """One of the following tasks, instead of an invalid row: one bad row of millions must not end a run."""
        where = f"{self.table.where}, {self.table.place(number)}"
        try:
            self._too_long(self.reader.task(row, where))
            self.counts["overlong"] += 1
            why = ConfigError(f"{where}, and {NEIGHBOURS} after it: too long. Write a larger sampling.max_context.")
        except (ConfigError, ValueError) as error:
            self.counts["bad"] += 1
            why = error if isinstance(error, ConfigError) else ConfigError(f"{where}: {error}")
            log.warning("%s A following row replaces it.", why)
        near = self.order.numbers(place + 1, NEIGHBOURS)
        for other, row in zip(near.tolist(), self.table.rows(near), strict=True):
            if task := self._task(row, self.split.name(other), seed):
                return task
        raise why


class EnvPool:
    """Tasks that an environment makes from seeds."""

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
    """Rows of an endless function. Going back restarts it."""

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
        self._where = f"data.sources.{self.name}.rows"
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
        tasks = list(islice(self._read(rows, held_out=True), count))  # fewer if hardly any row is held out
        return [replace(task, seed=derive(EVALUATION_SEED, "evaluation", i)) for i, task in enumerate(tasks)]

    def _tasks(self) -> Iterator[Task]:
        yield from self._read(call_rows(self.make, self.seed), held_out=False)
        raise ConfigError(f"{self._where}: the rows ended, though endless is set. Write endless=false.")

    def _read(self, rows: Iterable[Row], held_out: bool) -> Iterator[Task]:
        for number, row in enumerate(rows, 1):
            if (content_hash(row) < self.limit) is not held_out:
                continue
            where = f"{self._where}, row {number}"
            task = self.reader.task(row, where)
            if not self.filters.drops(task, where, self.counts):
                yield self.filters.cut(task)


def call_rows(make: Callable[..., Iterable[Row]], seed: int) -> Iterator[Row]:
    """The rows of a function, called with the seed if it has an unset argument `seed`."""
    parameters: Any = inspect.signature(make).parameters
    is_set = isinstance(make, partial) and "seed" in make.keywords
    return iter(make(seed=seed) if "seed" in parameters and not is_set else make())
