"""A run so far, metric by metric: what `trends.py` asks. Built from the rows of `metrics.jsonl`, or as they come."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from numbers import Real
from statistics import fmean, median
from typing import Any

FEWEST = 6
"""Steps from which on there is a beginning and an end to compare."""
LONGEST = 5
"""Steps of either, at most."""
HUGE = 1e100
"""Larger numbers count as this one, whose square is still a number."""
SURE = 4.0
"""Standard errors by which two means must differ to count as different: a run is looked at again and again."""


class Series:
    """One metric's finite values with their steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    @property
    def window(self) -> int:
        """Steps that a beginning or an end is made of."""
        return max(1, min(LONGEST, len(self) // 3))

    @property
    def early(self) -> float:
        return fmean(self.values[: self.window])

    @property
    def late(self) -> float:
        return fmean(self.values[-self.window :])

    @property
    def middle(self) -> float:
        return median(self.values)

    @property
    def latest(self) -> tuple[int, ...]:
        """The steps of the end."""
        return tuple(self.steps[-self.window :])

    @property
    def long(self) -> bool:
        return len(self) >= FEWEST

    def change(self, floor: float = 0.0) -> float:
        """End less beginning; 0 where that may be chance, or is less than `floor`."""
        if not self.long:
            return 0.0
        between = fmean((now - before) ** 2 for before, now in pairwise(self.values))
        error = math.sqrt(between / self.window)  # noise shows from step to step, where a trend does not
        change = self.late - self.early
        return change if abs(change) > max(SURE * error, floor) else 0.0


class Course:
    """The metrics of a run, step by step.

    Example:
        course = Course(read_metrics(folder / "metrics.jsonl"))
        course["policy/entropy"].late
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        self.series: dict[str, Series] = {}
        self.not_finite: dict[str, list[int]] = {}
        """Steps at which a metric was there and no number."""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        step = int(row["step"])
        for name, value in row.items():
            if name == "step" or not (value is None or isinstance(value, Real)):
                continue
            if value is None or not math.isfinite(value):
                self.not_finite.setdefault(name, []).append(step)
                continue
            own = self.series.setdefault(name, Series())
            own.steps.append(step)
            own.values.append(max(-HUGE, min(float(value), HUGE)))

    def __getitem__(self, name: str) -> Series:
        return self.series.get(name, Series())

    def named(self, start: str) -> dict[str, Series]:
        """Metrics that begin so, by the rest of their names."""
        return {name.removeprefix(start): own for name, own in self.series.items() if name.startswith(start)}

    def late(self, name: str, otherwise: float = 0.0) -> float:
        own = self[name]
        return own.late if len(own) else otherwise

    @property
    def solved(self) -> bool:
        """Whether nearly every episode succeeds at the end: then much that looks like a fault is a matter of course."""
        return self.late("episode/success") >= 0.9
