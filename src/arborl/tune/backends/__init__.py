"""Backends of a study: they choose the next parameters and run the trials.

optuna_study.py  Optuna: a database that survives a kill and that several processes share
ray_tune.py      Ray Tune: trials on the machines of a Ray cluster
wandb_sweep.py   Sweeps of Weights & Biases
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from arborl.errors import ConfigError
from arborl.registry import Registry
from arborl.tune.trial import Objective, StudyPlan, Trial

OnTrialEnd = Callable[[Trial], None]
"""Called with every finished trial."""


class Backend(Protocol):
    """Chooses parameters and runs trials. The unchanged settings come first and are never pruned."""

    async def run(self, plan: StudyPlan, objective: Objective, tell: OnTrialEnd) -> list[Trial]:
        """Run until the plan's number of trials is reached; returns all trials of the study."""
        ...


BACKENDS = Registry(
    "backend",
    {
        "optuna": "arborl.tune.backends.optuna_study:OptunaBackend",
        "ray_tune": "arborl.tune.backends.ray_tune:RayTuneBackend",
        "wandb": "arborl.tune.backends.wandb_sweep:WandbBackend",
    },
)


def find_backend(name: str) -> Backend:
    """The backend; its package must be there."""
    backend: Backend = BACKENDS[name]()
    return backend


def missing_package(backend: str, package: str, extra: str, error: ImportError) -> ConfigError:
    """One that cannot be used without a package."""
    return ConfigError(
        f"backend={backend} needs the package {package!r} ({error}). Write: pip install 'arborl[{extra}]'"
    )
