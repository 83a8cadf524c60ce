"""Parquet, a few rows at a time: memory is bounded by what a file unpacks to, whatever its size on disk.

A column may hold a long value once, in a dictionary, and repeat it in every row for a few bits. So 47 KB can stand for
5 GB. Rows are decoded in pieces that are small even if each holds the longest value, and what has been decoded is
counted.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

from arborl.errors import ConfigError

MOST_AT_ONCE = 2**26
"""Bytes that the rows decoded in one go have at worst."""
MOST_TOGETHER = 2**30
"""Bytes of the rows of a block."""
MOST_UNPACKED = 2**26
"""Bytes of a column of a row group that may be unpacked whatever they take on disk."""
MOST_VALUES = 2**22
"""Values of lists that a column of a row group may have whatever they take on disk."""
TIMES = 1000
"""How many times as much as on disk a column may have beyond that: nothing that holds data is packed so well."""


class ParquetReader:
    """Reads the row groups of one file within bounds.

    Args:
        data: the file's bytes.
        where: its name, for errors.
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
        """Each column of a row group as the footer describes it, and whether it lies in a list."""
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
            "which no data is. Write the file anew, or leave the column out."
        )

    def stream(self, group: int, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """The rows of a row group as tables of so many rows each; the last may have fewer."""
        import pyarrow

        held: list[Any] = []
        count = size = 0
        for batch in self._batches(group, rows, columns):
            held.append(batch)
            count, size = count + batch.num_rows, size + unpacked_size(batch)
            if size > MOST_TOGETHER and count > 1:
                raise ConfigError(
                    f"{self.where}, row group {group + 1}: {count:,} rows unpack to {size:,} bytes. Write the file "
                    "with shorter rows."
                )
            while count >= rows:
                whole = pyarrow.Table.from_batches(held)
                yield whole.slice(0, rows)
                rest = whole.slice(rows)
                held, count, size = rest.to_batches(), rest.num_rows, unpacked_size(rest)
        if count:
            yield pyarrow.Table.from_batches(held)

    def _batches(self, group: int, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """The rows of a row group, at most so many at a time."""
        at_once = max(1, min(rows, MOST_AT_ONCE // max(self.longest(group), 1)))
        yield from self.file.iter_batches(batch_size=at_once, row_groups=[group], columns=columns, use_threads=False)

    def longest(self, group: int) -> int:
        """Bytes of a row whose every value is the longest of its column's dictionary."""
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
            found = max((longest_in(array) for array in batch.columns), default=0) if batch is not None else 0
            column, in_list = known[name]
            whole = column.num_values * found
            packed = max(column.total_compressed_size, 1)
            if in_list and whole > MOST_TOGETHER + 10 * TIMES * packed:
                raise self._refused(group, column, f"{column.num_values:,} values of up to {found:,} bytes", packed)
            total += found
        return total

    def unpacked_within(self, most: int) -> bool:
        """Whether all rows together have no more than so many bytes; looks no further than that."""
        total = 0
        for group in range(self.file.metadata.num_row_groups):
            for batch in self._batches(group, 1024):
                total += unpacked_size(batch)
                if total > most:
                    return False
        return True


def unpacked_size(table: Any) -> int:
    """Bytes of an Arrow table or batch, with every value of a dictionary counted as often as it occurs."""
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
    """Bytes of the longest value of the dictionaries in an Arrow array, however deep in lists and structs."""
    import pyarrow
    import pyarrow.compute

    if pyarrow.types.is_dictionary(array.type) and _is_text(array.type.value_type):
        return int(pyarrow.compute.max(pyarrow.compute.binary_length(array.dictionary)).as_py() or 0)
    return max(map(longest_in, _inner(array)), default=0)


def _inner(array: Any) -> list[Any]:
    """The arrays within a nested one."""
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
