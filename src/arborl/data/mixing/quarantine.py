"""Tasks whose episodes fail again and again are set aside: another task of the same source replaces them for a while.

A draw of a task fails if all its episodes of a step failed, in the environment, a tool, a reward or the agent; low
rewards and failures of the engine do not count. After some failed draws in a row the task is set aside for twice the
usual time between its draws, and after each further failed draw for twice as long as before. One episode without a
failure ends this. The same holds for all tasks that name one agent or one environment.

What is drawn depends on the seed and on earlier results only, and the state is part of the checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arborl.failures import MODEL_COMPONENTS, component
from arborl.types import Episode, Task

log = logging.getLogger(__name__)

NUM_CANDIDATES = 64
"""Following tasks of a source that may replace a task."""
MAX_ENTRIES = 10_000
"""Tasks whose failed draws are remembered; of more, the latest."""
MAX_DOUBLINGS = 20
COPY = re.compile(r"#\d+$")
"""A task that is several times in a batch has an id with a number."""


@dataclass(slots=True)
class FailedDraws:
    """Failed draws in a row of a task, or of all tasks of an agent or an environment."""

    count: int
    first: int
    """Batch of the first one."""
    failure: str
    """Component and exception type of the last one."""
    interval: int = 1
    """Batches between two draws, on average, before it was first set aside."""
    until: int = 0
    """The first batch in which it is drawn again; 0 if it was never set aside."""
    is_replaced: bool = False
    """Whether another task has replaced it at least once."""


class TaskQuarantine:
    """What is set aside.

    Args:
        after: failed draws in a row after which something is set aside; 0 for never.
    """

    def __init__(self, after: int = 0):
        self.after = after
        self.entries: dict[str, FailedDraws] = {}

    def observe(self, batch: int, episodes: Iterable[Episode], repeats: Callable[[Task], bool]) -> None:
        """Count the draws of a step from the episodes that were trained or dropped in it. `repeats` tells whether a
        task can be drawn again."""
        results: dict[str, list[str]] = {}
        for episode in episodes if self.after else ():
            failure = episode.failure
            if failure is None or component(failure) not in MODEL_COMPONENTS:
                text = "" if failure is None else f"{failure.where}: {failure.kind}"
                for name in _names(episode.task, repeats(episode.task)):
                    results.setdefault(name, []).append(text)
        for name in sorted(results):  # the order of the episodes depends on time
            if "" in results[name]:
                self.entries.pop(name, None)
            else:
                self._add_failed_draw(name, batch, min(results[name]))

    def _add_failed_draw(self, name: str, batch: int, failure: str) -> None:
        entry = self.entries.setdefault(name, FailedDraws(0, batch, failure))
        if batch < entry.until:  # drawn before it was set aside, or not replaceable
            return
        entry.count, entry.failure = entry.count + 1, failure
        if entry.count >= self.after:
            if entry.until == 0 and entry.count > 1:
                entry.interval = max(1, (batch - entry.first) // (entry.count - 1))
            entry.until = batch + entry.interval * 2 ** min(entry.count - self.after + 1, MAX_DOUBLINGS)
        if len(self.entries) > MAX_ENTRIES:
            del self.entries[next(other for other in self.entries if other != name)]

    def replace(self, tasks: list[Task], batch: int, following: Callable[[], list[Task]]) -> tuple[list[Task], int]:
        """The tasks of one source for a batch, and how many were replaced. A task that is set aside is replaced by the
        next one of `following` that is not; without such a task it stays."""
        if not any(self._is_aside(task, batch) for task in tasks):
            return tasks, 0
        candidates = list({task.id: task for task in following() if not self._is_aside(task, batch)}.values())
        if not candidates:
            return tasks, 0
        present = {task.id for task in tasks}
        candidates.sort(key=lambda task: task.id in present)  # stable: the others keep their order
        out, num_replaced = [], 0
        for task in tasks:
            if self._is_aside(task, batch):
                self._report(task, batch)
                task = candidates[num_replaced % len(candidates)]
                num_replaced += 1
            out.append(task)
        return out, num_replaced

    def _is_aside(self, task: Task, batch: int) -> bool:
        return bool(self.entries) and any(self._until(name) > batch for name in _names(task))

    def _until(self, name: str) -> int:
        entry = self.entries.get(name)
        return 0 if entry is None else entry.until

    def _report(self, task: Task, batch: int) -> None:
        for name in _names(task):
            if self._until(name) > batch and not (entry := self.entries[name]).is_replaced:
                entry.is_replaced = True
                log.warning(
                    "%s is set aside until step %d: all its episodes failed in %d draws in a row (%s). Other tasks of "
                    "its source replace it. It is tried again then, and more rarely if it fails again. summary.json "
                    "lists it; data.quarantine=0 turns this off.", name, entry.until + 1, entry.count, entry.failure,
                )  # fmt: skip

    def summary(self) -> list[dict[str, Any]]:
        """What is set aside and has not succeeded since: the list in `summary.json`."""
        return [
            {"what": name, "failed_draws": entry.count, "until_step": entry.until + 1, "failure": entry.failure}
            for name, entry in sorted(self.entries.items())
            if entry.is_replaced
        ]

    def state(self) -> dict[str, Any]:
        return {name: dataclasses.asdict(entry) for name, entry in self.entries.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.entries = {name: FailedDraws(**entry) for name, entry in state.items()} if self.after else {}


def _names(task: Task, repeats: bool = True) -> list[str]:
    """The task, and the agent and the environment that it names."""
    names = [f"task {COPY.sub('', task.id)} of {task.source}"] if repeats else []
    names += [f"agent {task.agent} of {task.source}"] if task.agent else []
    return names + ([f"environment {task.env} of {task.source}"] if task.env else [])
