"""The numbers of a run, as series that a chart can draw."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from arborl.track.folder_files import Unreadable
from arborl.track.jsonl import read_metrics

POINTS = 1200
"""Of a series; of more, the lowest and the highest of each stretch are kept."""
KEPT = 32
"""Files that are remembered."""

MOST_VALUES = 5_000_000
"""Numbers of a run that are kept; of more, those of the first steps."""

Stamp = tuple[int, int, int]
Rows = list[dict[str, Any]]
_known: dict[Path, tuple[Stamp, Rows, str]] = {}
_lock = threading.Lock()


def rows_of(folder: Path) -> Rows:
    """The lines of `metrics.jsonl`; read again only where the file has changed."""
    return read_rows(folder)[0]


def read_rows(folder: Path) -> tuple[Rows, str]:
    """The same, and what is wrong with the file."""
    path, stamp = folder / "metrics.jsonl", stamp_of(folder)
    with _lock:
        if path in _known and _known[path][0] == stamp:
            return _known[path][1:]
    rows, problem = _read(path)
    with _lock:
        _known.pop(path, None)
        while len(_known) >= KEPT:
            _known.pop(next(iter(_known)))
        _known[path] = stamp, rows, problem
    return rows, problem


def _read(path: Path) -> tuple[Rows, str]:
    rows: Rows = []
    count = 0
    try:
        for row in read_metrics(path):
            count += len(row)
            if count > MOST_VALUES:
                return rows, f"{path.name}: has more than {MOST_VALUES:,} numbers; the first are shown."
            rows.append(row)
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{path.name}: cannot be read: {error.strerror}"
    except Unreadable as error:
        return [], str(error).removeprefix(f"{path.parent}/")
    return rows, ""


def stamp_of(folder: Path) -> Stamp:
    """Another one, whenever the file has changed."""
    try:
        found = (folder / "metrics.jsonl").lstat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def names_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was measured, in the order of the first lines that have it."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]


def series(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Of each name the steps that have it, the seconds of training up to then, and the values."""
    seconds = list(accumulate(_number(row.get("time/step")) or 0.0 for row in rows))
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        points = [
            (row["step"], spent, value)
            for row, spent in zip(rows, seconds, strict=True)
            if (value := _number(row.get(name))) is not None
        ]
        kept = thinned(points)
        if kept:
            columns = [list(column) for column in zip(*kept, strict=True)]
            found[name] = dict(zip(("step", "seconds", "value"), columns, strict=True))
    return found


def thinned(points: list[tuple[int, float, float]], most: int = POINTS) -> list[tuple[int, float, float]]:
    """At most so many points, with every peak of the whole.

    >>> [value for *_, value in thinned([(n, 0.0, 9.0 if n == 5 else 0.0) for n in range(100)], 10)][:2]
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
