"""Tables: rows by number, in memory, in Parquet files larger than memory, or in a Hugging Face dataset.

Parquet is decoded a few rows at a time within bounds on the decoded size. A column may store a long value once, in a
dictionary, and repeat it in every row, so a file of 47 KB can decode to 5 GB.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


class ParquetReader:
    """Reads the row groups of one file within bounds.

    Args:
        data: bytes of the file.
        where: name of the file, for errors.
    """

    def __init__(self, data: mmap.mmap | bytes, where: str):
        self.where, self._data = where, data
        self.file = self._open()
        self._longest: dict[int, int] = {}
        self._check_footer()

    def _open(self, read_dictionary: Sequence[str] | None = None) -> Any:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped]

        source = pyarrow.BufferReader(pyarrow.py_buffer(self._data))
        return pyarrow.parquet.ParquetFile(
            source, pre_buffer=False, buffer_size=2**20, read_dictionary=list(read_dictionary or ())
        )

    def _columns(self, group: int) -> Iterator[tuple[Any, bool]]:
        """Metadata of each column of a row group, and whether it is inside a list."""
        footer, schema = self.file.metadata, self.file.schema
        for index in range(footer.num_columns):
            yield footer.row_group(group).column(index), schema.column(index).max_repetition_level > 0

    def _check_footer(self) -> None:
        for group in range(self.file.metadata.num_row_groups):
            for column, in_list in self._columns(group):
                packed = max(column.total_compressed_size, 1)
                if column.total_uncompressed_size > max(MOST_UNPACKED, TIMES * packed):
                    raise self._refused(group, column, f"{column.total_uncompressed_size:,} bytes", packed)
                if in_list and column.num_values > max(MOST_VALUES, TIMES * packed):
                    raise self._refused(group, column, f"{column.num_values:,} values", packed)

    def _refused(self, group: int, column: Any, what: str, packed: int) -> ConfigError:
        return ConfigError(
            f"{self.where}, row group {group + 1}: column {column.path_in_schema!r} is {what} in {packed:,} bytes, "
            "which is not plausible. Write the file again, or without the column."
        )

    def stream(self, group: int, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
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
        at_once = max(1, min(rows, MOST_AT_ONCE // max(self.longest(group), 1)))
        yield from self.file.iter_batches(batch_size=at_once, row_groups=[group], columns=columns, use_threads=False)

    def longest(self, group: int) -> int:
        """Bytes of a row with the longest dictionary value in every column."""
        if group not in self._longest:
            self._longest[group] = self._find_longest(group)
        return self._longest[group]

    def _find_longest(self, group: int) -> int:
        known = {column.path_in_schema: (column, in_list) for column, in_list in self._columns(group)}
        names = [
            name
            for name, (column, _) in known.items()
            if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page
        ]
        if not names:
            return 0
        file, total = self._open(names), 0
        for name in names:
            batch = next(file.iter_batches(batch_size=1, row_groups=[group], columns=[name], use_threads=False), None)
            result = max((longest_in(array) for array in batch.columns), default=0) if batch is not None else 0
            column, in_list = known[name]
            whole = column.num_values * result
            packed = max(column.total_compressed_size, 1)
            if in_list and whole > MOST_TOGETHER + 10 * TIMES * packed:
                raise self._refused(group, column, f"{column.num_values:,} values of up to {result:,} bytes", packed)
            total += result
        return total

    def unpacked_within(self, most: int) -> bool:
        """Whether the decoded size of all rows is at most `most` bytes; stops when it is exceeded."""
        total = 0
        for group in range(self.file.metadata.num_row_groups):
            for batch in self._batches(group, 1024):
                total += unpacked_size(batch)
                if total > most:
                    return False
        return True


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
    """Child arrays of a nested array."""
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
        labels = cls()
        index = labels._index
        names = (None if value is None else str(value) for value in values)
        labels._parts.append(np.array([index.setdefault(name, len(index)) for name in names], np.int32))
        return labels

    def add(self, names: Sequence[Any], codes: np.ndarray) -> None:
        """Add rows as codes into `names`."""
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
        """Number of rows of each value."""
        return Counter(dict(zip(self.names, np.bincount(self.codes, minlength=len(self.names)).tolist(), strict=True)))

    def rows_of(self, name: str) -> Ints:
        """Numbers of the rows with this value."""
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
    """A Parquet file, memory-mapped and decoded block by block; recently used blocks are cached.

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
        """Halve the block until a window, estimated from a few decoded rows, fits the budget."""
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
        """Whether the decoded size of all rows is at most `most` bytes."""
        with _parquet_errors(self.where):
            return self._reader.unpacked_within(most)

    def rows(self, numbers: Sequence[int] | Ints) -> list[Row]:
        requested = np.asarray(numbers, np.int64)
        blocks = np.searchsorted(self._starts, requested, side="right") - 1
        out: list[Row] = [{}] * len(requested)
        for block in np.unique(blocks):
            at = np.flatnonzero(blocks == block)
            with _parquet_errors(self.where):
                result = as_rows(self._read(int(block)).take(requested[at] - self._starts[block]))
                for place, row in zip(at.tolist(), result, strict=True):
                    out[place] = row
        return out

    def place(self, number: int) -> str:
        return f"row {number + 1}"

    def labels(self, column: str) -> ColumnValues:
        """The values of one column; only that column is read."""
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
        """A decoded block, from the cache if possible."""
        if block not in self._kept:
            self._kept[block] = self._decode(block)
            _forget(self._map)
            most = RECENT * self.window
            while len(self._kept) > 1 and sum(self.sizes[b] for b in self._kept) > most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(block)
        return self._kept[block]

    def _decode(self, block: int) -> Any:
        """Decode a block from the stream of its row group, continued where it stopped."""
        group, part = self._home[block]
        with _parquet_errors(f"{self.where}, row group {group + 1}"):
            if self._stream is None or self._stream[0] != group or self._stream[1] > part:
                self._stream = group, 0, self._reader.stream(group, self.block)
            _, at, tables = self._stream
            for _ in range(at, part):
                next(tables)
            result = next(tables)
            self._stream = group, part + 1, tables
            return result


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
        requested = np.asarray(numbers, np.int64)
        table_index = np.searchsorted(self._starts, requested, side="right") - 1
        out: list[Row] = [{}] * len(requested)
        for index in np.unique(table_index):
            at = np.flatnonzero(table_index == index)
            for place, row in zip(
                at.tolist(), self.tables[index].rows(requested[at] - self._starts[index]), strict=True
            ):
                out[place] = row
        return out

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
    """Sizes of the blocks."""
    return [min(most, rows - start) for start in range(0, rows, most)] or [0]


def check_column_names(names: Sequence[str], where: str) -> None:
    """ConfigError for two columns with one name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{where}: two columns have the name {twice[0]!r}. Rename one.")


class _parquet_errors:
    """Turns errors of Arrow into a ConfigError with the name of the file."""

    def __init__(self, where: str):
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import pyarrow

        if isinstance(error, pyarrow.ArrowException | OSError | UnicodeDecodeError | LookupError):
            raise ConfigError(f"{self.where}: not a valid Parquet file: {error}") from error


def get_path(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None. A column whose name contains the dots has precedence.

    Example:
        get_path({"reward_model": {"ground_truth": "42"}}, "reward_model.ground_truth")      # '42'
    """
    if path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    inner = row.get(head) if dot else None
    return get_path(inner, rest) if isinstance(inner, Mapping) else None
