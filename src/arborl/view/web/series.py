"""Metrics as series for charts: three horizontal axes, values that are not finite, and means over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, Literal

from arborl.track.folder_files import finite_number
from arborl.trainer.evaluation import student
from arborl.view.web.folders import Rows, flat

MAX_POINTS = 1200
"""Points of a series; of more, minimum and maximum of each interval are kept."""
SEED_KEYS = ("seed", "output_dir", "name", "trainer.checkpoint_dir")
"""Settings that may differ between runs that are averaged."""
AXES = ("step", "seconds", "tokens")
Axis = Literal["step", "seconds", "tokens"]
Range = tuple[Axis, float, float]
"""An axis and the ends of the part of it that is shown."""
Band = Literal["range", "interval"]
"""`range`: lowest to highest value; `interval`: 95 % interval of the mean (Student's t)."""
Columns = dict[str, list[Any]]
Point = tuple[Any, ...]
"""Step, seconds, tokens, value, and of a mean the lower and the upper end of its band."""


def series(rows: Rows, names: Sequence[str], within: Range | None = None) -> dict[str, Columns]:
    """Steps, seconds of training, tokens and values of each metric. A value that is not finite is None. With `within`,
    the points of a range and its neighbours only, in more detail if there are many."""
    found = {}
    for name in names:
        points = [point for point in _points(rows, name) if point is not None]
        if points:
            found[name] = _columns(points, (*AXES, "value"), within)
    return found


def bands(runs: Sequence[Rows], names: Sequence[str], band: Band, within: Range | None = None) -> dict[str, Columns]:
    """Mean and band of each metric over runs of one setting, at steps at which all runs have a finite value."""
    found = {}
    for name in names:
        by_step = [
            {point[0]: point for point in _points(rows, name) if point and point[3] is not None} for rows in runs
        ]
        steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
        points = [_mean_point([points[step] for points in by_step], band) for step in steps]
        if points:
            found[name] = _columns(points, (*AXES, "value", "low", "high"), within)
    return found


def _mean_point(points: Sequence[Point], band: Band) -> Point:
    seconds, tokens, values = ([point[column] for point in points] for column in (1, 2, 3))
    low, high = min(values), max(values)
    if band == "interval":
        low, high = student(values) or (low, high)
    return (points[0][0], fmean(seconds), fmean(tokens), fmean(values), low, high)


def _points(rows: Rows, name: str) -> Iterable[Point | None]:
    """A point for each row; None if the metric was not recorded as a number."""
    seconds = accumulate(finite_number(row.get("time/step")) or 0.0 for row in rows)
    tokens = accumulate(map(tokens_of, rows))
    for row, spent, sampled in zip(rows, seconds, tokens, strict=True):
        is_number = name in row and (row[name] is None or type(row[name]) in (int, float))
        yield (row["step"], spent, sampled, finite_number(row[name])) if is_number else None


def tokens_of(row: Mapping[str, Any]) -> float:
    """Tokens that a step trained on: those that its episodes sampled, or the loss terms of demonstrations.

    >>> tokens_of({"episode/count": 4, "episode/sampled": 2.5, "learner/terms": 9})
    10.0
    >>> tokens_of({"learner/terms": 9})
    9
    """
    count, sampled = finite_number(row.get("episode/count")), finite_number(row.get("episode/sampled"))
    if count is not None and sampled is not None:
        return float(count * sampled)
    return finite_number(row.get("learner/terms")) or 0


def _columns(points: list[Point], names: Sequence[str], within: Range | None) -> Columns:
    if within is not None and len(points) > MAX_POINTS:
        column, low, high = AXES.index(within[0]), *within[1:]
        inside = [at for at, point in enumerate(points) if low <= point[column] <= high]
        points = points[max(inside[0] - 1, 0) : inside[-1] + 2] if inside else points
    kept = downsample(points)
    columns: Columns = dict(zip(names, ([*column] for column in zip(*kept, strict=True)), strict=True))
    return columns | ({"of": [len(points)]} if len(kept) < len(points) else {})


def downsample(points: list[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points that keep all peaks, and of the values that are not finite one in each interval.

    >>> [point[3] for point in downsample([(n, 0, 0, 9.0 if n == 5 else 0.0) for n in range(100)], 10)][:2]
    [0.0, 9.0]
    """
    if len(points) <= most:
        return points
    width = -(-3 * len(points) // most)
    kept: list[Point] = []
    for begin in range(0, len(points), width):
        some = points[begin : begin + width]
        known = [point for point in some if point[3] is not None]
        picked = [min(known, key=lambda point: point[3]), max(known, key=lambda point: point[3])] if known else []
        picked += [point for point in some if point[3] is None][:1]
        kept += sorted({point[0]: point for point in picked}.values(), key=lambda point: point[0])
    return kept


def seed_groups(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Runs of equal settings except `SEED_KEYS`, by the settings in which they differ from the other runs. A run
    without a readable configuration is not grouped with another."""
    rows = {run: flat(config) for run, config in configs.items()}
    keys = [key for key in dict.fromkeys(key for row in rows.values() for key in row) if key not in SEED_KEYS]
    differ = [key for key in keys if len({setting_text(row.get(key)) for row in rows.values()}) > 1]
    groups: dict[str, list[str]] = {}
    for run, row in rows.items():
        label = (
            ", ".join(f"{key}={setting_text(row.get(key))}" for key in differ) if row else f"{run}: no configuration"
        )
        groups.setdefault(label, []).append(run)
    return groups


def setting_text(value: Any) -> str:
    """The value of a setting in one line."""
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
