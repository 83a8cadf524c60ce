"""Tables: rows by number, in memory, in Parquet files larger than memory, or in a Hugging Face dataset.

Parquet is decoded a few rows at a time within bounds on the decoded size. A column may store a long value once, in a
dictionary, and repeat it in every row, so a file of 47 KB can decode to 5 GB.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from arborl.errors import ConfigError
from arborl.types import Ints

MOST_AT_ONCE = 2**26
"""Largest decoded size of one batch, in bytes."""
MOST_TOGETHER = 2**30
"""Largest decoded size of one block."""
MOST_UNPACKED = 2**26
"""Decoded size of a column chunk that is accepted whatever its size on disk."""
MOST_VALUES = 2**22
"""List values of a column chunk that are accepted whatever its size on disk."""
TIMES = 1000
"""Largest compression ratio beyond that; real data does not reach it."""


def unpacked_size(table: Any) -> int:
    """Decoded bytes of an Arrow table or batch; dictionary values count as often as they occur."""
    total = 0
    for column in table.columns:
        for array in getattr(column, "chunks", [column]):
            total += _size(array)
    return total


def _size(array: Any) -> int:
    import pyarrow
    import pyarrow.compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind) and _is_text(kind.value_type):
        lengths = pyarrow.compute.binary_length(array.dictionary)
        return int(pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0) + int(array.nbytes)
    return int(array.nbytes) + sum(_size(inner) - int(inner.nbytes) for inner in _inner(array))


def longest_in(array: Any) -> int:
    """Bytes of the longest dictionary value in a nested Arrow array."""
    import pyarrow
    import pyarrow.compute

    if pyarrow.types.is_dictionary(array.type) and _is_text(array.type.value_type):
        return int(pyarrow.compute.max(pyarrow.compute.binary_length(array.dictionary)).as_py() or 0)
    return max(map(longest_in, _inner(array)), default=0)


def _inner(array: Any) -> list[Any]:
    import pyarrow

    kind = array.type
    if pyarrow.types.is_struct(kind):
        return [array.field(index) for index in range(kind.num_fields)]
    if pyarrow.types.is_map(kind):
        return [array.keys, array.items]
    return [array.flatten()] if pyarrow.types.is_nested(kind) and hasattr(array, "flatten") else []


def _is_text(kind: Any) -> bool:
    import pyarrow

    check = pyarrow.types
    return check.is_string(kind) or check.is_binary(kind) or check.is_large_string(kind) or check.is_large_binary(kind)


# ------------------------------------------------------------------------------------------------ tables

Row = dict[str, Any]

BLOCK = 16_384
"""Rows of a block; a larger row group is several blocks."""
BUDGET = 48 * 2**20
"""Bytes of decoded rows in the cache."""
RECENT = 1.5
"""Cached windows: the current one and part of the next."""


class ColumnValues:
    """A column with few distinct values: the values, and the code of each row."""

    def __init__(self) -> None:
        self._index: dict[str | None, int] = {}
        self._parts: list[np.ndarray] = []

    @classmethod
    def of(cls, values: Iterable[Any]) -> ColumnValues:
        labels, values = cls(), list(values)
        labels.add(values, np.arange(len(values)))
        return labels

    def add(self, names: Sequence[Any], codes: np.ndarray) -> None:
        index = self._index
        texts = (None if name is None else str(name) for name in names)
        self._parts.append(np.array([index.setdefault(name, len(index)) for name in texts], np.int32)[codes])

    @property
    def names(self) -> list[str | None]:
        return list(self._index)

    @property
    def codes(self) -> np.ndarray:
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)

    def count(self) -> Counter[str | None]:
        return Counter(dict(zip(self.names, np.bincount(self.codes, minlength=len(self.names)).tolist(), strict=True)))

    def rows_of(self, name: str) -> Ints:
        return np.flatnonzero(self.codes == self._index.get(name, -1))


class Table(Protocol):
    """Rows by number, from 0."""

    where: str
    """Name of the file, for errors."""
    sizes: Ints
    """Number of rows of each block; a block is read at once."""
    runs: Ints
    """Number of blocks of each run; the blocks of a run are cheap to read in order only."""
    window: int
    """Rows whose blocks fit into the cache."""
    ahead: int
    """Rows to read ahead."""
    whole: bool
    """Whether all rows are in memory."""

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        """These rows, in this order."""
        ...

    def place(self, number: int) -> str:
        """Name of the row for errors: `row 3`, `line 7`."""
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
    """A Parquet file, memory-mapped and decoded block by block within bounds; recently used blocks are cached.

    A row group is decoded from its beginning. A larger one is decoded as a stream, so its blocks are a run: reading
    them in order decodes each once.

    Args:
        path: the file.
        block: largest number of rows of a block.
        budget: bytes of decoded rows in the cache.
    """

    whole = False

    def __init__(self, path: Path, block: int = BLOCK, budget: int = BUDGET):
        self.path, self.where = path, str(path)
        self._longest: dict[int, int] = {}
        with self._errors():
            self._map = _mapped(path)
            self.file = self._open()
            footer = self.file.metadata
            self.groups = range(footer.num_row_groups)
            self._check_footer()
        check_column_names(self.file.schema_arrow.names, self.where)
        self.block = self._fitting(block, budget)
        cuts = [_cut(footer.row_group(group).num_rows, self.block) for group in self.groups]
        self.sizes = np.array([size for cut in cuts for size in cut], np.int64)
        self.runs = np.array([len(cut) for cut in cuts], np.int64)
        self._home = [(group, part) for group, cut in enumerate(cuts) for part in range(len(cut))]
        self._starts = (np.cumsum(self.sizes) - self.sizes).tolist()
        self.window = max(4 * self.block, int(self.sizes.max(initial=1)))
        self.ahead = max(self.block // 8, 1)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._stream: tuple[int, int, Iterator[Any]] | None = None

    def _open(self, read_dictionary: Sequence[str] = ()) -> Any:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped]

        source = pyarrow.BufferReader(pyarrow.py_buffer(self._map))
        return pyarrow.parquet.ParquetFile(
            source, pre_buffer=False, buffer_size=2**20, read_dictionary=list(read_dictionary)
        )

    @contextmanager
    def _errors(self, more: str = "") -> Iterator[None]:
        """Turns errors of Arrow into a ConfigError with the name of the file."""
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError, LookupError) as error:
            raise ConfigError(f"{self.where}{more}: not a valid Parquet file: {error}") from error

    # -------------------------------------------------------------------------------------------- rows

    def each(self) -> Iterator[Row]:
        with self._errors():
            for group in self.groups:
                for table in self._tables(group, self.block):
                    yield from as_rows(table)

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        def read(block: int, places: Ints) -> Iterable[Row]:
            with self._errors():
                return list(as_rows(self._read(block).take(places)))

        return _gather(numbers, self._starts, read)

    def place(self, number: int) -> str:
        return f"row {number + 1}"

    def labels(self, column: str) -> ColumnValues:
        if column not in self.file.schema_arrow.names:
            return ColumnValues.of([None] * int(self.sizes.sum()))
        labels = ColumnValues()
        with self._errors():
            for group in self.groups:
                for table in self._tables(group, BLOCK, [column]):
                    encoded = table.column(0).combine_chunks().dictionary_encode("encode")
                    labels.add(encoded.dictionary.to_pylist(), np.asarray(encoded.indices))
                    _forget(self._map)
        return labels

    def _read(self, block: int) -> Any:
        """A decoded block, from the cache, or from the stream of its row group, continued where it stopped."""
        if block not in self._kept:
            group, part = self._home[block]
            with self._errors(f", row group {group + 1}"):
                if self._stream is None or self._stream[0] != group or self._stream[1] > part:
                    self._stream = group, 0, self._tables(group, self.block)
                _, at, tables = self._stream
                for _ in range(at, part):
                    next(tables)
                self._kept[block] = next(tables)
                self._stream = group, part + 1, tables
            _forget(self._map)
            while len(self._kept) > 1 and sum(self.sizes[b] for b in self._kept) > RECENT * self.window:
                self._kept.popitem(last=False)
        self._kept.move_to_end(block)
        return self._kept[block]

    # -------------------------------------------------------------------------------------------- bounds

    def _columns(self, group: int) -> Iterator[tuple[Any, bool]]:
        footer, schema = self.file.metadata, self.file.schema
        for index in range(footer.num_columns):
            yield footer.row_group(group).column(index), schema.column(index).max_repetition_level > 0

    def _check_footer(self) -> None:
        for group in self.groups:
            for column, in_list in self._columns(group):
                packed = max(column.total_compressed_size, 1)
                if column.total_uncompressed_size > max(MOST_UNPACKED, TIMES * packed):
                    raise self._refused(group, column, f"{column.total_uncompressed_size:,} bytes")
                if in_list and column.num_values > max(MOST_VALUES, TIMES * packed):
                    raise self._refused(group, column, f"{column.num_values:,} values")

    def _refused(self, group: int, column: Any, what: str) -> ConfigError:
        return ConfigError(
            f"{self.where}, row group {group + 1}: column {column.path_in_schema!r} is {what} in "
            f"{max(column.total_compressed_size, 1):,} bytes, which is not plausible. Write the file again, or without "
            "the column."
        )

    def _fitting(self, block: int, budget: int) -> int:
        """Halve the block until a window, estimated from a few decoded rows, fits the budget."""
        with self._errors():
            sample = next((table for group in self.groups for table in self._tables(group, 64)), None)
        width = max(unpacked_size(sample) / max(sample.num_rows, 1), 1.0) if sample is not None else 1.0
        while block > 1 and 4 * RECENT * block * width > budget:
            block //= 2
        return block

    def unpacked_within(self, most: int) -> bool:
        """Whether the decoded size of all rows is at most `most` bytes; stops when it is exceeded."""
        with self._errors():
            sizes = (unpacked_size(batch) for group in self.groups for batch in self._batches(group, 1024))
            return all(total <= most for total in accumulate(sizes))

    def _tables(self, group: int, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """The row group as tables of `rows` rows each; the last may have fewer."""
        import pyarrow

        pending: list[Any] = []
        count = size = 0
        for batch in self._batches(group, rows, columns):
            pending.append(batch)
            count, size = count + batch.num_rows, size + unpacked_size(batch)
            if size > MOST_TOGETHER and count > 1:
                raise ConfigError(
                    f"{self.where}, row group {group + 1}: {count:,} rows unpack to {size:,} bytes. Write the file "
                    "with shorter rows."
                )
            while count >= rows:
                whole = pyarrow.Table.from_batches(pending)
                yield whole.slice(0, rows)
                rest = whole.slice(rows)
                pending, count, size = rest.to_batches(), rest.num_rows, unpacked_size(rest)
        if count:
            yield pyarrow.Table.from_batches(pending)

    def _batches(self, group: int, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Batches of a row group, small enough for the longest values."""
        if group not in self._longest:
            self._longest[group] = self._longest_row(group)
        at_once = max(1, min(rows, MOST_AT_ONCE // max(self._longest[group], 1)))
        yield from self.file.iter_batches(batch_size=at_once, row_groups=[group], columns=columns, use_threads=False)

    def _longest_row(self, group: int) -> int:
        """Bytes of a row with the longest dictionary value in every column."""
        columns = [
            (column, in_list)
            for column, in_list in self._columns(group)
            if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page
        ]
        if not columns:
            return 0
        file, total = self._open([column.path_in_schema for column, _ in columns]), 0
        for column, in_list in columns:
            only = [column.path_in_schema]
            batch = next(file.iter_batches(batch_size=1, row_groups=[group], columns=only, use_threads=False), None)
            longest = max(map(longest_in, batch.columns), default=0) if batch is not None else 0
            most = MOST_TOGETHER + 10 * TIMES * max(column.total_compressed_size, 1)
            if in_list and column.num_values * longest > most:
                raise self._refused(group, column, f"{column.num_values:,} values of up to {longest:,} bytes")
            total += longest
        return total


def _gather(
    numbers: Sequence[int] | Ints, starts: Sequence[int], read: Callable[[int, Ints], Iterable[Row]]
) -> list[Row]:
    """Rows by number from parts that begin at `starts`; `read` returns rows of one part."""
    requested = np.asarray(numbers, np.int64)
    parts = np.searchsorted(starts, requested, side="right") - 1
    out: list[Row] = [{}] * len(requested)
    for part in np.unique(parts):
        at = np.flatnonzero(parts == part)
        for place, row in zip(at.tolist(), read(int(part), requested[at] - starts[part]), strict=True):
            out[place] = row
    return out


class HubTable:
    """A Hugging Face dataset in memory-mapped files."""

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
    """Several tables, concatenated."""

    def __init__(self, tables: Sequence[Table], where: str):
        self.tables, self.where = tables, where
        self.sizes = np.concatenate([table.sizes for table in tables])
        self.runs = np.concatenate([table.runs for table in tables])
        self.window = max(table.window for table in tables)
        self.whole = all(table.whole for table in tables)
        self.ahead = min(table.ahead for table in tables)
        self._starts = np.cumsum([0, *(int(table.sizes.sum()) for table in tables)]).tolist()

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        return _gather(numbers, self._starts, lambda index, places: self.tables[index].rows(places))

    def place(self, number: int) -> str:
        index = bisect_right(self._starts, number) - 1
        table = self.tables[index]
        return f"{Path(table.where).name}, {table.place(number - self._starts[index])}"

    def labels(self, column: str) -> ColumnValues:
        labels = ColumnValues()
        for table in self.tables:
            values = table.labels(column)
            labels.add(values.names, values.codes)
        return labels


def as_rows(table: Any) -> Iterator[Row]:
    """The rows of an Arrow table; converting columns is several times as fast as `Table.to_pylist`."""
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
    """Release the pages that were read, else the whole file would count as memory of this process."""
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _cut(rows: int, most: int) -> list[int]:
    return [min(most, rows - start) for start in range(0, rows, most)] or [0]


def check_column_names(names: Sequence[str], where: str) -> None:
    """ConfigError for two columns with one name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{where}: two columns have the name {twice[0]!r}. Rename one.")


def get_path(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None. A column whose name contains the dots has precedence."""
    if path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    inner = row.get(head) if dot else None
    return get_path(inner, rest) if isinstance(inner, Mapping) else None


def has_path(row: Mapping[str, Any], path: str) -> bool:
    """Whether there is a value at a dotted path, which may be None."""
    head, dot, rest = path.partition(".")
    inner = row.get(head) if dot else None
    return path in row or (isinstance(inner, Mapping) and has_path(inner, rest))
