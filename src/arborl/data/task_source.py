"""The interface of task sources, and tasks of environments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from arborl.data.reading.train_splits import EVALUATION_SEED
from arborl.errors import ConfigError
from arborl.registry import short_name
from arborl.seeds import derive
from arborl.types import Episode, Group, Metrics, Task


class TaskSource(Protocol):
    """A source of tasks. Subclasses define `take` and `evaluation`."""

    def take(self, step: int, count: int) -> list[Task]:
        """The tasks of one training step; a function of its arguments.

        If `count` changes between steps, the steps must be taken in order, or from a `state`.
        """
        ...

    def evaluation(self, count: int) -> list[Task]:
        """At most `count` held-out tasks, which `take` never returns; the same for every run seed."""
        ...

    def beside(self, step: int) -> list[Task]:
        """Offline tasks that the step trains on besides the sampled ones."""
        return []

    def steps(self, passes: int, count: int) -> int:
        """Number of steps of `count` tasks in so many passes over all rows; ConfigError for endless sources."""
        raise ConfigError(f"trainer.epochs={passes}: an environment makes tasks without end. Write trainer.steps.")

    def observe(self, step: int, groups: Sequence[Group]) -> Metrics:
        """Receive the groups of a step; returns metrics of the data."""
        return {}

    def observe_episodes(self, step: int, episodes: Iterable[Episode]) -> None:
        """Receive the sampled episodes that were trained or dropped in a step, also of dropped groups."""
        return None

    def set_aside(self) -> list[dict[str, Any]]:
        """Tasks that are not drawn for a while because their episodes failed; for `summary.json`."""
        return []

    def state(self, step: int) -> dict[str, Any]:
        """State for a checkpoint before this step."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        return None


def env_task(env: str, source: str, split: str, name: str, seed: int) -> Task:
    return Task(f"{short_name(source)}/{split}/{name}", source=source, env=env, fields={"split": split}, seed=seed)


def held_out_seed(number: int) -> int:
    """Seed of a held-out task of an environment; the same for every run."""
    return derive(EVALUATION_SEED, "evaluation", number)


class EnvTasks(TaskSource):
    """Tasks that the environment makes, step by step. `EnvPool` is the same for one of several sources."""

    def __init__(self, env: str, seed: int):
        self.env, self.seed = env, seed

    def take(self, step: int, count: int) -> list[Task]:
        """Task ids contain the step that trains on them."""
        return [
            env_task(self.env, self.env, "train", f"{step + 1:06d}-{i:03d}", derive(self.seed, "task", step, i))
            for i in range(count)
        ]

    def evaluation(self, count: int) -> list[Task]:
        return [env_task(self.env, self.env, "held_out", f"{i:03d}", held_out_seed(i)) for i in range(count)]
