"""Which checkpoint is the best one by a metric (`trainer.keep_best`): `scores.json` beside the checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arborl.errors import disk_errors

FILE = "scores.json"


@dataclass(slots=True)
class CheckpointScores:
    """The value of a metric at some steps. A name that begins with `-`, such as `-evaluation/loss`: lower is better."""

    metric: str = ""
    values: dict[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path, metric: str | None = None) -> CheckpointScores:
        """The recorded values; none if the file is missing or unreadable, or has another metric."""
        try:
            found = json.loads((root / FILE).read_text(encoding="utf-8"))
            name, values = str(found["metric"]), {int(step): float(value) for step, value in found["values"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls(metric or "")
        if metric is not None and name != metric:
            return cls(metric)
        return cls(name, {step: value for step, value in values.items() if math.isfinite(value)})

    def write(self, root: Path) -> None:
        fresh = root / f".{FILE}.tmp"
        with disk_errors(root / FILE):
            fresh.write_text(json.dumps({"metric": self.metric, "values": self.values}, indent=1), encoding="utf-8")
            os.replace(fresh, root / FILE)

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Record the metric of a step; returns whether it is better than all before. A missing or non-finite value is
        not recorded."""
        value = metrics.get(self.metric.removeprefix("-"))
        if value is None or not math.isfinite(value):
            return False
        others = [self._score(at) for at in self.values if at != step]
        self.values = self.values | {step: float(value)}  # a new one: a checkpoint may be written in another thread
        return not others or self._score(step) > max(others)

    def keep_only(self, steps: Collection[int]) -> None:
        self.values = {at: value for at, value in self.values.items() if at in steps}

    def best(self, steps: Iterable[int]) -> int | None:
        """The best of these steps, of several equal ones the first; None if none has a value."""
        scored = sorted(step for step in steps if step in self.values)
        return max(scored, key=self._score, default=None)

    def _score(self, step: int) -> float:
        return -self.values[step] if self.metric.startswith("-") else self.values[step]
