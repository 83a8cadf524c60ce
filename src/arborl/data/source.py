"""What the trainer takes tasks from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from arborl.data.reading.splits import EVALUATION_SEED
from arborl.errors import ConfigError
from arborl.registry import short_name
from arborl.seeds import derive
from arborl.types import Group, Metrics, Task


class TaskSource(Protocol):
    """Where tasks come from. `take` and `evaluation` are yours to write; subclass `TaskSource` to inherit the rest."""

    def take(self, step: int, count: int) -> list[Task]:
        """The tasks of one training step; the same for the same arguments, in whatever order steps are asked for.

        Where `count` changes from step to step, steps are asked for in order, or from a `state`.
        """
        ...

    def evaluation(self, count: int) -> list[Task]:
        """At most `count` tasks that `take` never gives; the same for every run seed."""
        ...

    def beside(self, step: int) -> list[Task]:
        """Given tasks that the step learns from besides those it plays."""
        return []

    def steps(self, passes: int, count: int) -> int:
        """Steps of `count` tasks that so many passes over all rows take; ConfigError where tasks never end."""
        raise ConfigError(
            f"trainer.epochs={passes}: tasks that an environment makes have no end to pass. Write trainer.steps."
        )

    def observe(self, step: int, groups: Sequence[Group]) -> Metrics:
        """Hear how a step's tasks went; what is worth logging about them and where they came from."""
        return {}

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint before this step must remember."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` said."""
        return None


def env_task(env: str, source: str, split: str, name: str, seed: int) -> Task:
    """A task that an environment makes itself, from its seed."""
    return Task(f"{short_name(source)}/{split}/{name}", source=source, env=env, fields={"split": split}, seed=seed)


def held_out_seed(number: int) -> int:
    """Of an environment's held-out tasks: the same for every run, whatever its seed."""
    return derive(EVALUATION_SEED, "evaluation", number)


class EnvTasks(TaskSource):
    """Tasks the environment makes itself, step by step. (`EnvPool` is the same as one of several sources, place by
    place.)

    Args:
        env: name of the environment.
        seed: the run's.
    """

    def __init__(self, env: str, seed: int):
        self.env, self.seed = env, seed

    def take(self, step: int, count: int) -> list[Task]:
        """Named after the step they are trained in: after `step` steps comes the next."""
        return [
            env_task(self.env, self.env, "train", f"{step + 1:06d}-{i:03d}", derive(self.seed, "task", step, i))
            for i in range(count)
        ]

    def evaluation(self, count: int) -> list[Task]:
        return [env_task(self.env, self.env, "held_out", f"{i:03d}", held_out_seed(i)) for i in range(count)]
