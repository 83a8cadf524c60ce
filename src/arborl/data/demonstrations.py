"""Demonstrations first, tasks afterwards; and where so asked, some demonstrations beside the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arborl.config.data_config import DemonstrationsConfig, RowsConfig
from arborl.config.run_config import RunConfig
from arborl.data.from_config import GivenRows, open_given
from arborl.data.mixing.mixture import Mixture
from arborl.data.source import TaskSource
from arborl.types import Group, Metrics, Task

NAME = "demonstrations"
"""What their source is called."""


def with_demonstrations(
    source: TaskSource, config: RunConfig, rows: GivenRows, objects: Mapping[str, Any] | None = None
) -> TaskSource:
    """A run's source with demonstrations before its tasks, and beside them, where so asked.

    Args:
        source: of the tasks that are played.
        config: of the run.
        rows: how transcripts are read.
        objects: parts handed in by Python code, by the name the configuration uses for them.
    """
    asked = config.demonstrations
    if not asked.enabled:
        return source
    read = RowsConfig(path=asked.path, rows=asked.rows, overlong=asked.overlong)
    return WithDemonstrations(source, open_given(read, NAME, config.seed, rows, objects), asked)


class WithDemonstrations(TaskSource):
    """A source whose first steps are given tasks.

    Args:
        inner: of the tasks that are played; it begins at the step after.
        shown: the demonstrations.
        config: how many of them, and when.
    """

    def __init__(self, inner: TaskSource, shown: Mixture, config: DemonstrationsConfig):
        self.inner, self.shown, self.config = inner, shown, config
        if isinstance(inner, Mixture):
            inner.start_at(config.steps)

    def take(self, step: int, count: int) -> list[Task]:
        alone = step < self.config.steps
        return self.shown.take(step, self.config.batch) if alone else self.inner.take(step, count)

    def beside(self, step: int) -> list[Task]:
        mixed = self.config.weight > 0 and step >= self.config.steps
        return self.shown.take(step, self.config.batch) if mixed else []

    def evaluation(self, count: int) -> list[Task]:
        return self.inner.evaluation(count)

    def observe(self, step: int, groups: Sequence[Group]) -> Metrics:
        alone = step < self.config.steps
        metrics = self.shown.metrics(step) if alone or self.config.weight > 0 else {}
        return metrics if alone else metrics | self.inner.observe(step, groups)

    def state(self, step: int) -> dict[str, Any]:
        begun = max(step, self.config.steps)
        shown = self.shown.state(step if self.config.weight > 0 else min(step, self.config.steps))
        return {"inner": self.inner.state(begun), NAME: shown}

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state.get("inner", {}))
        self.shown.load_state(state.get(NAME, {}))
