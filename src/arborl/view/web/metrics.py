"""The metrics of a run as series for charts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from arborl.track.folder_files import Unreadable
from arborl.track.jsonl import read_metrics

MAX_POINTS = 1200
"""Points of a series; of more, minimum and maximum of each interval are kept."""
MAX_CACHED = 32
"""Files in the cache."""

MAX_VALUES = 5_000_000
"""Numbers of a run that are read; of more, those of the first steps."""

Stamp = tuple[int, int, int]
Rows = list[dict[str, Any]]
_known: dict[Path, tuple[Stamp, Rows, str]] = {}
_lock = threading.Lock()


def rows_of(folder: Path) -> Rows:
    """The rows of `metrics.jsonl`; cached until the file changes."""
    return read_rows(folder)[0]


def read_rows(folder: Path) -> tuple[Rows, str]:
    """The rows and the file's problem."""
    path, stamp = folder / "metrics.jsonl", stamp_of(folder)
    with _lock:
        if path in _known and _known[path][0] == stamp:
            return _known[path][1:]
    rows, problem = _read(path)
    with _lock:
        _known.pop(path, None)
        while len(_known) >= MAX_CACHED:
            _known.pop(next(iter(_known)))
        _known[path] = stamp, rows, problem
    return rows, problem


def _read(path: Path) -> tuple[Rows, str]:
    rows: Rows = []
    count = 0
    try:
        for row in read_metrics(path):
            count += len(row)
            if count > MAX_VALUES:
                return rows, f"{path.name}: has more than {MAX_VALUES:,} numbers; the first are shown."
            rows.append(row)
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{path.name}: cannot be read: {error.strerror}"
    except Unreadable as error:
        return [], str(error).removeprefix(f"{path.parent}/")
    return rows, ""


def stamp_of(folder: Path) -> Stamp:
    try:
        found = (folder / "metrics.jsonl").lstat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def names_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]


def series(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Steps, training seconds and values of each metric."""
    seconds = list(accumulate(_number(row.get("time/step")) or 0.0 for row in rows))
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        points = [
            (row["step"], spent, value)
            for row, spent in zip(rows, seconds, strict=True)
            if (value := _number(row.get(name))) is not None
        ]
        kept = downsample(points)
        if kept:
            columns = [list(column) for column in zip(*kept, strict=True)]
            found[name] = dict(zip(("step", "seconds", "value"), columns, strict=True))
    return found


def downsample(points: list[tuple[int, float, float]], most: int = MAX_POINTS) -> list[tuple[int, float, float]]:
    """At most `most` points that keep all peaks.

    >>> [value for *_, value in downsample([(n, 0.0, 9.0 if n == 5 else 0.0) for n in range(100)], 10)][:2]
    [0.0, 9.0]
    """
    if len(points) <= most:
        return points
    width = -(-2 * len(points) // most)
    kept = []
    for begin in range(0, len(points), width):
        some = points[begin : begin + width]
        kept += sorted({min(some, key=lambda one: one[2]), max(some, key=lambda one: one[2])})
    return kept


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and value == value and abs(value) != float("inf") else None
