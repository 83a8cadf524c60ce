"""Opens files of rows. Errors name the file and the row."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from arborl.config.load_config import MAX_DEPTH, is_text
from arborl.data.reading.tables import ConcatenatedTable, ListTable, ParquetTable, Row, Table, check_column_names
from arborl.errors import ConfigError

MAX_CELL = 2**30
"""Characters of a CSV cell; Python's default of 131,072 is too small for documents."""
MEMORY_ROWS, MEMORY_BYTES = 100_000, 64 * 2**20
"""A smaller Parquet file is read into memory, as files of other formats always are."""
MEMORY_UNPACKED = 4 * MEMORY_BYTES
"""Largest decoded size of such a file."""


def open_table(path: Path) -> Table:
    """The rows of a file, or of all files in a folder."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
        if not files:
            raise ConfigError(f"{path}: the folder has no data files. Put files into it: {', '.join(READERS)}.")
        return files_as_one(files, str(path))
    if path.suffix.lower() == ".parquet" and path.is_file():
        large = ParquetTable(path)
        footer = large.file.metadata
        size = sum(footer.row_group(index).total_byte_size for index in range(footer.num_row_groups))
        if footer.num_rows > MEMORY_ROWS or size > MEMORY_BYTES or not large.unpacked_within(MEMORY_UNPACKED):
            return large
    return ListTable(read_rows(path), str(path))


def open_tables(paths: Sequence[Path]) -> Table:
    """The rows of several files or folders, one after another."""
    return files_as_one(list(paths), ", ".join(map(str, paths)))


def files_as_one(files: list[Path], where: str) -> Table:
    tables = [open_table(file) for file in files]
    return tables[0] if len(tables) == 1 else ConcatenatedTable(tables, where)


def read_rows(path: Path) -> list[tuple[str, Row]]:
    """All rows with their names for errors (`row 3`, from 1; `line 3` in JSONL)."""
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"{path}: unknown file format {path.suffix!r}. Give one of {', '.join(READERS)}.")
    if not path.is_file():
        what = "is a folder; give a file" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {what}. data.path is looked up from {Path.cwd()}.")
    try:
        rows = list(read(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error}). Save it as UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return objects_only(rows, str(path))


def objects_only(rows: list[tuple[str, Any]], where: str) -> list[tuple[str, Any]]:
    """The rows; ConfigError if there are none or one is not an object."""
    if not rows:
        raise ConfigError(f"{where}: there are no rows. Give at least one task.")
    for place, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{where}, {place}: {type(row).__name__}, not an object with columns.")
        if fault := _fault(row):
            raise ConfigError(f"{where}, {place}: {fault}. Correct or remove the row.")
    return rows


def _fault(value: Any, depth: int = 0) -> str | None:
    """Why a value cannot be hashed, written or tokenized, or None."""
    if isinstance(value, str):
        return None if is_text(value) else "half of a surrogate pair, which is not text"
    if depth > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} deep"
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = chain(value, value.values())
    elif isinstance(value, list | tuple):
        inner = value
    return next((fault for item in inner if (fault := _fault(item, depth + 1))), None)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}. For one object a line, name the file .jsonl.") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: {type(rows).__name__} at the top, not a list of rows. Write [{{…}}, {{…}}].")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: not valid JSON: {error}") from error


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(MAX_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            check_column_names(names, str(path))
            for number, cells in enumerate((cells for cells in reader if cells), 1):
                if len(cells) != len(names):
                    raise ConfigError(f"{path}, row {number}: {len(cells)} cells, but the header names {len(names)}.")
                yield f"row {number}", dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(ParquetTable(path).each(), 1):
        yield f"row {number}", row


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
