"""What a backend is, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from arborl.errors import ConfigError
from arborl.registry import Registry
from arborl.tune.trial import Objective, Plan, Trial

Tell = Callable[[Trial], None]
"""Called with every trial that has ended."""


class Backend(Protocol):
    """Chooses settings and has them tried. The settings as they are come first, and are never pruned."""

    async def run(self, plan: Plan, objective: Objective, tell: Tell) -> list[Trial]:
        """Until the plan's number of trials is there; returns all of the study, earlier ones included."""
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


def missing(backend: str, package: str, extra: str, error: ImportError) -> ConfigError:
    """One that cannot be used without a package."""
    return ConfigError(
        f"backend={backend} needs the package {package!r} ({error}). Write: pip install 'arborl[{extra}]'"
    )
