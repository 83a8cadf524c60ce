"""The metrics of a run as series over steps, from the rows of `metrics.jsonl` or added step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]
Values = NDArray[np.float64]

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
    """The finite values of one metric with their steps. No operation has a Python loop over steps: a run is examined
    after every step, and may have a hundred thousand."""

    def __init__(self) -> None:
        self._steps, self._values = np.zeros(16, np.int64), np.zeros(16)
        self._count = 0

    def add(self, step: int, value: float) -> None:
        if self._count == len(self._values):
            self._steps, self._values = (np.concatenate([one, one]) for one in (self._steps, self._values))
        self._steps[self._count], self._values[self._count] = step, value
        self._count += 1

    @property
    def steps(self) -> Steps:
        return self._steps[: self._count]

    @property
    def values(self) -> Values:
        return self._values[: self._count]

    def __len__(self) -> int:
        return self._count

    @property
    def window(self) -> int:
        """Number of steps averaged at the beginning and at the end."""
        return max(1, min(MAX_WINDOW, len(self) // 3))

    @property
    def window_means(self) -> Values:
        """Means of every `window` consecutive values."""
        return window_means(self.values, self.window)

    @property
    def early(self) -> float:
        return mean(self.values[: self.window])

    @property
    def late(self) -> float:
        return mean(self.values[-self.window :])

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def total(self) -> float:
        return float(self.values.sum())

    @property
    def lowest(self) -> float:
        return float(self.values.min(initial=np.inf))

    @property
    def highest(self) -> float:
        return float(self.values.max(initial=-np.inf))

    @property
    def last_steps(self) -> tuple[int, ...]:
        return tuple(self.steps[-self.window :].tolist())

    @property
    def best_step(self) -> int:
        """Last step of the `window` steps with the highest mean."""
        return int(self.steps[int(self.window_means.argmax()) + self.window - 1])

    def mean_until(self, step: int) -> float:
        """Mean of the `window` values up to this step."""
        count = max(int(np.searchsorted(self.steps, step, side="right")), self.window)
        return mean(self.values[count - self.window : count])

    @property
    def is_long(self) -> bool:
        return len(self) >= MIN_STEPS

    def steps_where(self, is_chosen: Callable[[Values], NDArray[np.bool_]]) -> tuple[int, ...]:
        return tuple(self.steps[is_chosen(self.values)].tolist())

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
        noise = math.sqrt(float((np.diff(self.values) ** 2).mean()) / self.window)
        return noise * (1.0 + SHORT_SERIES / len(self))


def mean(values: Values) -> float:
    """As in `window_means`, to the last bit: means of equal values must be equal."""
    return float(window_means(values, len(values))[0])


def window_means(values: Values, window: int) -> Values:
    """Means of every `window` consecutive values."""
    count = len(values) - window + 1
    total = values[:count].copy()
    for offset in range(1, window):
        total += values[offset : offset + count]
    return total / window


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
            if (series := self.series.get(name)) is None:
                series = self.series[name] = MetricSeries()
            series.add(step, max(-MAX_ABS, min(float(value), MAX_ABS)))

    @property
    def last_step(self) -> int:
        return max((int(series.steps[-1]) for series in self.series.values()), default=0)

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
