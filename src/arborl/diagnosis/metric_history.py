"""The metrics of a run as series over steps, from the rows of `metrics.jsonl` or added step by step."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from numbers import Real
from statistics import fmean, median
from typing import Any

MIN_STEPS = 6
"""Steps that a trend needs: fewer have no beginning and end to compare."""
MAX_WINDOW = 5
PATIENCE = 3
"""Steps in a row with one diagnosis before a warning; failed batches in a row that stop a run which once worked."""
MAX_ABS = 1e100
"""Larger numbers are clipped to this one, whose square is finite."""
NUM_STANDARD_ERRORS = 4.0
"""Difference of two means that counts as a change. Large, because a run is tested after every step."""


SHORT_SERIES = 4.0
"""Factor of the larger standard error of short series: 1 + this / number of steps."""


class MetricSeries:
    """The finite values of one metric with their steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    @property
    def window(self) -> int:
        """Number of steps averaged at the beginning and at the end."""
        return max(1, min(MAX_WINDOW, len(self) // 3))

    @property
    def early(self) -> float:
        return fmean(self.values[: self.window])

    @property
    def late(self) -> float:
        return fmean(self.values[-self.window :])

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def total(self) -> float:
        return sum(self.values)

    @property
    def last_steps(self) -> tuple[int, ...]:
        return tuple(self.steps[-self.window :])

    @property
    def best_step(self) -> int:
        """Last step of the `window` steps with the highest mean."""
        ends = range(self.window, len(self) + 1)
        return self.steps[max(ends, key=lambda end: fmean(self.values[end - self.window : end])) - 1]

    def mean_until(self, step: int) -> float:
        """Mean of the `window` values up to this step."""
        count = max(bisect_right(self.steps, step), self.window)
        return fmean(self.values[count - self.window : count])

    @property
    def is_long(self) -> bool:
        return len(self) >= MIN_STEPS

    def steps_where(self, condition: Callable[[float], bool]) -> tuple[int, ...]:
        return tuple(step for step, value in self if condition(value))

    def change(self, minimum: float = 0.0) -> float:
        """`late - early`, or 0 where it may be chance."""
        if not self.is_long:
            return 0.0
        change = self.late - self.early
        return change if abs(change) > max(NUM_STANDARD_ERRORS * self.standard_error, minimum) else 0.0

    @property
    def standard_error(self) -> float:
        """Of the difference of two means over `window` steps; the noise is estimated from neighbouring steps. A few
        steps may be alike by chance, so it is larger for short series."""
        noise = math.sqrt(fmean((now - before) ** 2 for before, now in pairwise(self.values)) / self.window)
        return noise * (1.0 + SHORT_SERIES / len(self))


class MetricHistory:
    """The metrics of a run by name."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        self.series: dict[str, MetricSeries] = {}
        self.not_finite: dict[str, list[int]] = {}
        """Steps at which a metric was present and not finite."""
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
            series = self.series.setdefault(name, MetricSeries())
            series.steps.append(step)
            series.values.append(max(-MAX_ABS, min(float(value), MAX_ABS)))

    @property
    def last_step(self) -> int:
        return max((series.steps[-1] for series in self.series.values()), default=0)

    def __getitem__(self, name: str) -> MetricSeries:
        return self.series.get(name, MetricSeries())

    def with_prefix(self, prefix: str) -> dict[str, MetricSeries]:
        return {name.removeprefix(prefix): one for name, one in self.series.items() if name.startswith(prefix)}

    def late(self, name: str, default: float = 0.0) -> float:
        series = self[name]
        return series.late if len(series) else default

    @property
    def is_solved(self) -> bool:
        """Whether nearly every episode succeeds at the end; zero variance and low entropy are then expected."""
        return self.late("episode/success") >= 0.9
