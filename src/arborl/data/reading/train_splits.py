"""Training, held-out and filtered rows.

A table in memory is scanned at the start: errors are found then, and a hash of the content decides which rows are held
out. A larger table is not scanned unless a setting needs it; then the row number decides.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from arborl.data.reading.row_reader import RowReader, content_hash
from arborl.data.reading.tables import Row, Table
from arborl.errors import ConfigError
from arborl.seeds import generator
from arborl.types import Ints, Message, Task

CountTokens = Callable[[Sequence[Message]], int]
"""Messages -> tokens of the prompt."""

EVALUATION_SEED = 0
"""Seed of held-out tasks, independent of the run's seed: runs are compared on the same tasks."""
SPREAD = 16
"""Number of evenly spaced blocks of a large table that held-out tasks are taken from."""
CHUNK = 8_192


@dataclass(frozen=True, slots=True)
class PromptFilters:
    """Limits on prompts."""

    max_tokens: int = 0
    """Longest prompt; 0 for no limit."""
    overlong: Literal["drop", "cut", "refuse"] = "drop"
    deduplicate: bool = False
    length: CountTokens | None = None
    whole: Callable[[Task], int] | None = None
    """Counts the tokens of a whole offline row; then this is limited. Such a row is cut when it is trained on."""

    @property
    def leaves_out(self) -> bool:
        """Whether rows may be dropped, so that the whole table must be scanned."""
        # offline rows of a large table are checked when they are taken
        late = self.whole is not None and self.overlong == "drop"
        return self.deduplicate or (self.max_tokens > 0 and self.overlong != "cut" and not late)

    def too_long(self, task: Task) -> int:
        """The number of tokens if it exceeds the limit, else 0."""
        tokens = 0
        if self.max_tokens:
            tokens = self.whole(task) if self.whole else self.length(task.messages) if self.length else 0
        return tokens if tokens > self.max_tokens else 0

    def drops(self, task: Task, where: str, counts: Counter[str]) -> bool:
        """Whether a task is left out because it is too long; counts it. ConfigError with `overlong=refuse`."""
        try:
            tokens = self.too_long(task)
        except ValueError as error:  # of the chat template
            raise ConfigError(f"{where}: {error}") from error
        if tokens and self.overlong == "refuse":
            what, limit = ("row", "sampling.max_context") if self.whole else ("prompt", "max_prompt_tokens")
            raise ConfigError(
                f"{where}: the {what} has {tokens} tokens, {limit} is {self.max_tokens}. Raise it, or write "
                "overlong=drop or cut."
            )
        if tokens:
            counts["cut" if self.overlong == "cut" else "overlong"] += 1
        return tokens > 0 and self.overlong == "drop"

    def cut(self, task: Task) -> Task:
        """The task with its longest message cut until the prompt fits."""
        if self.overlong != "cut" or self.whole is not None or not self.too_long(task):
            return task
        index = max(range(len(task.messages)), key=lambda i: len(task.messages[i].content))
        longest = task.messages[index]

        def shortened(size: int) -> Task:
            changed = replace(longest, content=f"{longest.content[:size]}…")
            return replace(task, messages=(*task.messages[:index], changed, *task.messages[index + 1 :]))

        low, high = 0, len(longest.content)
        while low < high:  # binary search for the most characters that fit
            middle = (low + high + 1) // 2
            if self.too_long(shortened(middle)):
                high = middle - 1
            else:
                low = middle
        return shortened(low)


class SelectedRows:
    """A list of row numbers."""

    def __init__(self, table: Table, numbers: Ints):
        self.numbers, self.runs = np.sort(numbers), table.runs
        self._bounds = np.searchsorted(self.numbers, np.concatenate([[0], np.cumsum(table.sizes)]))
        self.sizes: Ints = np.diff(self._bounds)

    def of(self, block: int) -> Ints:
        return self.numbers[self._bounds[block] : self._bounds[block + 1]]


class RowNumbers:
    """Training or held-out rows of a table that is not scanned: a share of every block, or the rest."""

    def __init__(self, table: Table, share: float, held_out: bool):
        self.held_out, self.runs = held_out, table.runs
        self._all: Ints = table.sizes
        self._held = np.floor(table.sizes * share).astype(np.int64)
        self._starts = np.cumsum(table.sizes) - table.sizes
        self.sizes: Ints = self._held if held_out else table.sizes - self._held

    def of(self, block: int) -> Ints:
        order = generator(EVALUATION_SEED, "held out", block).permutation(int(self._all[block]))
        is_held_out = int(self._held[block])
        rows: Ints = self._starts[block] + (order[:is_held_out] if self.held_out else np.sort(order[is_held_out:]))
        return rows


@dataclass(frozen=True, slots=True)
class Split:
    """Training and held-out rows of a table."""

    training: SelectedRows | RowNumbers
    held_out: Ints
    """Numbers of held-out rows, in order; of a large table only a few thousand."""
    counts: Counter[str]
    """Dropped rows by reason."""
    digests: np.ndarray | None = None
    """Hash of the content of each row of a table in memory."""

    def name(self, number: int) -> str:
        """Name of a row without an id: its content hash if known, else its number."""
        return f"{number:08d}" if self.digests is None else f"{int(self.digests[number]):016x}"


def split_table(
    table: Table, reader: RowReader, share: float, how: Literal["auto", "content", "number"], filters: PromptFilters
) -> Split:
    """Split a table. `share=0` holds nothing out."""
    must_scan = table.whole or filters.leaves_out or how == "content"
    if not must_scan:
        training = RowNumbers(table, share, held_out=False)
        return Split(training, spread_rows(RowNumbers(table, share, held_out=True)), Counter())
    numbers, contents, counts = _scan(table, reader, filters)
    if not len(numbers):
        why = ", ".join(f"{count} {name}" for name, count in counts.items())
        remedy = " Write a larger max_prompt_tokens, or overlong=cut." if counts["overlong"] else ""
        raise ConfigError(f"{table.where}: all rows are filtered out ({why}).{remedy}")
    digests = np.array([_hash(str(number)) for number in numbers], np.uint64) if how == "number" else contents
    is_held_out = digests < np.uint64(_limit(digests, share) if share else 0)
    order = np.argsort(digests[is_held_out], kind="stable")
    known = None
    if table.whole:
        known = np.zeros(int(table.sizes.sum()), np.uint64)
        known[numbers] = contents
    return Split(SelectedRows(table, numbers[~is_held_out]), numbers[is_held_out][order], counts, known)


def _scan(table: Table, reader: RowReader, filters: PromptFilters) -> tuple[Ints, np.ndarray, Counter[str]]:
    """Read and filter every row: the numbers of the kept rows, hashes of their content, and dropped rows by reason."""
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    numbers, digests = [], []
    for number, row in _each(table):
        where = f"{table.where}, {table.place(number)}"
        task = reader.task(row, where, name=str(number))
        if filters.deduplicate:
            key = _hash(repr([(message.role, message.content) for message in task.messages]), 12)
            if key in seen:
                counts["duplicate"] += 1
                continue
        if filters.drops(task, where, counts):
            continue
        if filters.deduplicate:
            seen.add(key)
        numbers.append(number)
        digests.append(content_hash(row))
    return np.array(numbers, np.int64), np.array(digests, np.uint64), counts


def _each(table: Table) -> Iterator[tuple[int, Row]]:
    size = int(table.sizes.sum())
    for start in range(0, size, CHUNK):
        numbers = range(start, min(start + CHUNK, size))
        yield from zip(numbers, table.rows(numbers), strict=True)


def _hash(text: str, size: int = 8) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big")


def _limit(digests: np.ndarray, share: float) -> int:
    """Rows with a smaller hash are held out. It is adjusted so that neither part is empty."""
    low, high = int(digests.min()), int(digests.max())
    return min(max(int(share * 2**64), low + 1), high)  # a single row is trained on


def spread_rows(side: RowNumbers, most: int = 8_192) -> Ints:
    """Rows from evenly spaced blocks, one from each in turn."""
    full = np.flatnonzero(side.sizes > 0)
    chosen = full[np.linspace(0, len(full) - 1, min(SPREAD, len(full))).astype(np.int64)] if len(full) else full
    rows = [side.of(int(block))[: most // max(len(chosen), 1)] for block in chosen]
    turns = range(max((len(block_rows) for block_rows in rows), default=0))
    return np.array([block_rows[turn] for turn in turns for block_rows in rows if turn < len(block_rows)], np.int64)
