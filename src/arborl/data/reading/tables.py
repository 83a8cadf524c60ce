"""Rows by number, wherever they are: in memory, in Parquet files too large for it, or in a Hugging Face dataset."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from arborl.data.reading.parquet import ParquetReader, unpacked_size
from arborl.errors import ConfigError
from arborl.types import Ints

Row = dict[str, Any]

BLOCK = 16_384
"""Rows of a block; a row group with more is several of them."""
BUDGET = 48 * 2**20
"""Bytes of decoded rows that are kept."""
RECENT = 1.5
"""Windows that are kept: the present one, and blocks of the next."""


class ColumnValues:
    """A column with few different values: their names, and for each row the index of its own (None has one too)."""

    def __init__(self) -> None:
        self._index: dict[str | None, int] = {}
        self._parts: list[np.ndarray] = []

    @classmethod
    def of(cls, values: Iterable[Any]) -> ColumnValues:
        labels = cls()
        index = labels._index
        names = (None if value is None else str(value) for value in values)
        labels._parts.append(np.array([index.setdefault(name, len(index)) for name in names], np.int32))
        return labels

    def add(self, names: Sequence[Any], codes: np.ndarray) -> None:
        """Further rows, by indices into names of their own."""
        index = self._index
        told = (None if name is None else str(name) for name in names)
        self._parts.append(np.array([index.setdefault(name, len(index)) for name in told], np.int32)[codes])

    @property
    def names(self) -> list[str | None]:
        return list(self._index)

    @property
    def codes(self) -> np.ndarray:
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)

    def count(self) -> Counter[str | None]:
        """Rows by name."""
        return Counter(dict(zip(self.names, np.bincount(self.codes, minlength=len(self.names)).tolist(), strict=True)))

    def rows_of(self, name: str) -> Ints:
        """Numbers of the rows with this value."""
        return np.flatnonzero(self.codes == self._index.get(name, -1))


class Table(Protocol):
    """Rows by number, from 0."""

    where: str
    """The file, for error messages."""
    sizes: Ints
    """Rows of each block: what is read at once."""
    runs: Ints
    """How many blocks are in each run of blocks that is cheap to read in order only."""
    window: int
    """Rows whose blocks may be kept at once."""
    ahead: int
    """Rows that are worth reading at once."""
    whole: bool
    """Whether all rows are in memory, and may be looked at one by one."""

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        """These rows, in this order."""
        ...

    def place(self, number: int) -> str:
        """What a person calls the row: `row 3`, `line 7`."""
        ...

    def labels(self, column: str) -> ColumnValues:
        """The values of one column of all rows."""
        ...


class ListTable:
    """Rows in memory."""

    whole = True
    ahead = 1

    def __init__(self, rows: Sequence[tuple[str, Row]], where: str):
        self.where, self._rows = where, rows
        self.sizes, self.runs = np.array([len(rows)], np.int64), np.ones(1, np.int64)
        self.window = max(len(rows), 1)

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        return [self._rows[int(number)][1] for number in numbers]

    def place(self, number: int) -> str:
        return self._rows[number][0]

    def labels(self, column: str) -> ColumnValues:
        return ColumnValues.of([row.get(column) for _, row in self._rows])


class ParquetTable:
    """A Parquet file, memory-mapped and decoded a block at a time; only blocks in use are kept.

    A row group is decoded from its beginning. One that is larger than a block is decoded as a stream, so its blocks are
    a run: reading them in order decodes each once.

    Args:
        path: the file.
        block: most rows of a block.
        budget: bytes of decoded rows to keep.
    """

    whole = False

    def __init__(self, path: Path, block: int = BLOCK, budget: int = BUDGET):
        self.path, self.where = path, str(path)
        with _parquet_errors(str(path)):
            self._map = _mapped(path)
            self._reader = ParquetReader(self._map, self.where)
            self.file = self._reader.file
        check_column_names(self.file.schema_arrow.names, self.where)
        footer = self.file.metadata
        groups = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
        self.block = self._fitting(block, budget)
        cuts = [_cut(rows, self.block) for rows in groups]
        self.sizes = np.array([size for cut in cuts for size in cut], np.int64)
        self.runs = np.array([len(cut) for cut in cuts], np.int64)
        self._home = [(group, part) for group, cut in enumerate(cuts) for part in range(len(cut))]
        self._starts = (np.cumsum(self.sizes) - self.sizes).tolist()
        self.window = max(4 * self.block, int(self.sizes.max(initial=1)))
        self.ahead = max(self.block // 8, 1)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._stream: tuple[int, int, Iterator[Any]] | None = None

    def _fitting(self, block: int, budget: int) -> int:
        """A block is a power of two smaller where a few rows, decoded, show that a window would not fit the budget."""
        with _parquet_errors(self.where):
            groups = range(self.file.metadata.num_row_groups)
            sample = next((table for group in groups for table in self._reader.stream(group, 64)), None)
        width = max(unpacked_size(sample) / max(sample.num_rows, 1), 1.0) if sample is not None else 1.0
        while block > 1 and 4 * RECENT * block * width > budget:
            block //= 2
        return block

    def each(self) -> Iterator[Row]:
        """Every row, in order."""
        with _parquet_errors(self.where):
            for group in range(self.file.metadata.num_row_groups):
                for table in self._reader.stream(group, self.block):
                    yield from as_rows(table)

    def unpacked_within(self, most: int) -> bool:
        """Whether all rows together have no more than so many bytes."""
        with _parquet_errors(self.where):
            return self._reader.unpacked_within(most)

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        wanted = np.asarray(numbers, np.int64)
        blocks = np.searchsorted(self._starts, wanted, side="right") - 1
        out: list[Row] = [{}] * len(wanted)
        for block in np.unique(blocks):
            at = np.flatnonzero(blocks == block)
            with _parquet_errors(self.where):
                found = as_rows(self._read(int(block)).take(wanted[at] - self._starts[block]))
                for place, row in zip(at.tolist(), found, strict=True):
                    out[place] = row
        return out

    def place(self, number: int) -> str:
        return f"row {number + 1}"

    def labels(self, column: str) -> ColumnValues:
        """The values of one column, and nothing else is read."""
        if column not in self.file.schema_arrow.names:
            return ColumnValues.of([None] * int(self.sizes.sum()))
        labels = ColumnValues()
        with _parquet_errors(self.where):
            for group in range(self.file.metadata.num_row_groups):
                for table in self._reader.stream(group, BLOCK, [column]):
                    encoded = table.column(0).combine_chunks().dictionary_encode("encode")
                    labels.add(encoded.dictionary.to_pylist(), np.asarray(encoded.indices))
                    _forget(self._map)
        return labels

    def _read(self, block: int) -> Any:
        """A block, decoded; the ones used last are kept."""
        if block not in self._kept:
            self._kept[block] = self._decode(block)
            _forget(self._map)
            most = RECENT * self.window
            while len(self._kept) > 1 and sum(self.sizes[b] for b in self._kept) > most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(block)
        return self._kept[block]

    def _decode(self, block: int) -> Any:
        """A block, from a stream of its row group that goes on where it was left."""
        group, part = self._home[block]
        with _parquet_errors(f"{self.where}, row group {group + 1}"):
            if self._stream is None or self._stream[0] != group or self._stream[1] > part:
                self._stream = group, 0, self._reader.stream(group, self.block)
            _, at, tables = self._stream
            for _ in range(at, part):
                next(tables)
            found = next(tables)
            self._stream = group, part + 1, tables
            return found


class HubTable:
    """A Hugging Face dataset, which keeps its rows in memory-mapped files."""

    whole = False

    def __init__(self, dataset: Any, where: str, block: int = BLOCK):
        self.dataset, self.where = dataset, where
        self.sizes = np.array(_cut(len(dataset), block), np.int64)
        self.runs = np.ones(len(self.sizes), np.int64)
        self.window = 4 * block
        self.ahead = 64

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        columns = self.dataset[[int(number) for number in numbers]]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def place(self, number: int) -> str:
        return f"row {number + 1}"

    def labels(self, column: str) -> ColumnValues:
        there = column in self.dataset.column_names
        return ColumnValues.of(self.dataset[column] if there else [None] * len(self.dataset))


class ConcatenatedTable:
    """Several tables, one behind the other."""

    def __init__(self, tables: Sequence[Table], where: str):
        self.tables, self.where = tables, where
        self.sizes = np.concatenate([table.sizes for table in tables])
        self.runs = np.concatenate([table.runs for table in tables])
        self.window = max(table.window for table in tables)
        self.whole = all(table.whole for table in tables)
        self.ahead = min(table.ahead for table in tables)
        self._starts = np.cumsum([0, *(int(table.sizes.sum()) for table in tables)]).tolist()

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        wanted = np.asarray(numbers, np.int64)
        whose = np.searchsorted(self._starts, wanted, side="right") - 1
        out: list[Row] = [{}] * len(wanted)
        for index in np.unique(whose):
            at = np.flatnonzero(whose == index)
            for place, row in zip(at.tolist(), self.tables[index].rows(wanted[at] - self._starts[index]), strict=True):
                out[place] = row
        return out

    def place(self, number: int) -> str:
        index = bisect_right(self._starts, number) - 1
        table = self.tables[index]
        return f"{Path(table.where).name}, {table.place(number - self._starts[index])}"

    def labels(self, column: str) -> ColumnValues:
        labels = ColumnValues()
        for table in self.tables:
            own = table.labels(column)
            labels.add(own.names, own.codes)
        return labels


def as_rows(table: Any) -> Iterator[Row]:
    """The rows of an Arrow table; column by column, which is several times as fast as its own `to_pylist`."""
    names = table.column_names
    for values in zip(*(column.to_pylist() for column in table.columns), strict=True):
        yield dict(zip(names, values, strict=False))


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return b""


def _forget(mapped: mmap.mmap | bytes) -> None:
    """Let go of the pages that were read: else all of a file would in time count as this process's memory."""
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _cut(rows: int, most: int) -> list[int]:
    """Sizes of the blocks of so many rows."""
    return [min(most, rows - start) for start in range(0, rows, most)] or [0]


def check_column_names(names: Sequence[str], where: str) -> None:
    """Of two columns with one name, only one would be read."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{where}: two columns are called {twice[0]!r}. Give one another name.")


class _parquet_errors:
    """What Arrow raises, as one line that names the file."""

    def __init__(self, where: str):
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import pyarrow

        if isinstance(error, pyarrow.ArrowException | OSError | UnicodeDecodeError | LookupError):
            raise ConfigError(f"{self.where}: not a valid Parquet file: {error}") from error


def get_path(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none. A column whose name has dots in it comes first.

    Example:
        get_path({"reward_model": {"ground_truth": "42"}}, "reward_model.ground_truth")      # '42'
    """
    if path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    inner = row.get(head) if dot else None
    return get_path(inner, rest) if isinstance(inner, Mapping) else None
