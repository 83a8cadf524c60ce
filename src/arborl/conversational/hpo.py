"""Hyper-parameter search for conversational agents in Python; `arborl tune` does the same for a file."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from arborl.config.run_config import folder_name
from arborl.errors import ConfigError
from arborl.tune.space import Domain, Params, get_search_space, read_space
from arborl.tune.study import FolderInUse, search
from arborl.tune.trial import HPOSummary, StudyPlan, TrialReport, require_positive

__all__ = ["HPOConfig", "HPOSummary", "get_search_space", "quick_hpo"]


class TrialFunction(Protocol):
    """Trains a copy of the agent with these parameters; returns the mean reward on held-out scenarios."""

    def __call__(
        self,
        agent: Any,
        environment: Any,
        reward_fn: Any,
        config: Any,
        params: Params,
        *,
        folder: Path,
        report: TrialReport,
    ) -> Awaitable[float]: ...


@dataclass(frozen=True, slots=True)
class HPOConfig:
    """Settings of a search; checked when the object is made.

    Example:
        HPOConfig(search_space={"learning_rate": {"type": "loguniform", "low": 1e-7, "high": 1e-4},
                                "num_generations": {"type": "categorical", "choices": [4, 8, 16]}}, n_trials=100)
    """

    search_space: Mapping[str, Any] | str = "grpo"
    """Parameters with their domains, or the name of a space: see `get_search_space`."""
    n_trials: int = 50
    """Number of trials; the first one is the unchanged configuration."""
    optimization_direction: Literal["maximize", "minimize"] = "maximize"
    pruning: bool = True
    """Stop trials early that are worse than the median."""
    seed: int = 0
    """Seed of the search; trials have the seed of their configuration."""

    def __post_init__(self) -> None:
        require_positive("n_trials", self.n_trials)
        self.plan(Path())

    @property
    def space(self) -> dict[str, Domain]:
        space = self.search_space
        return read_space(get_search_space(space) if isinstance(space, str) else space)

    def plan(self, folder: Path, default: Params | None = None) -> StudyPlan:
        direction, pruning = self.optimization_direction, self.pruning
        return StudyPlan(self.space, self.n_trials, folder, direction, pruning, self.seed, default=default or {})


async def quick_hpo(
    agent: Any,
    environment: Any,
    reward_function: Any,
    base_config: Any,
    n_trials: int | None = None,
    backend: str = "optuna",
    *,
    search_space: Mapping[str, Any] | str | None = None,
    hpo_config: HPOConfig | None = None,
    folder: str | Path | None = None,
    run_trial: TrialFunction | None = None,
) -> HPOSummary:
    """Search for a better training configuration. Every trial starts from the agent's current weights.

    The first trial is the unchanged `base_config`. A second call with the same folder continues the study.

    Example:
        summary = await quick_hpo(agent=agent, environment=environment, reward_function=reward_fn, base_config=config,
                                  n_trials=50)
        summary.best_params, summary.best_reward

    Args:
        agent, environment, reward_function, base_config: as for `train`.
        n_trials: number of trials; default: 50.
        backend: `optuna`, `ray_tune` or `wandb`.
        search_space: parameters with their domains, or the name of a space; default: `grpo`.
        hpo_config: these and more settings in one object.
        folder: study folder; default: `studies/` and the agent's class, with a number if that holds another study.
        run_trial: replaces `arborl.conversational.agent_training.run_trial`.
    """
    if hpo_config is not None and (n_trials is not None or search_space is not None):
        raise ConfigError("hpo_config sets n_trials and search_space. Leave them out.")
    config = hpo_config or HPOConfig(search_space or "grpo", 50 if n_trials is None else n_trials)
    from arborl.conversational.agent_training import run_trial as train_once  # imports torch

    run_once: TrialFunction = run_trial or train_once

    async def objective(params: Params, report: TrialReport) -> float:
        arguments = (agent, environment, reward_function, base_config, params)
        return await run_once(*arguments, folder=report.folder, report=report)

    default = {name: getattr(base_config, name, None) for name in config.space}
    for study in [Path(folder)] if folder is not None else _default_folders(type(agent).__name__):
        try:
            return await search(
                config.plan(study, default), objective, backend, {"base_config": _as_texts(base_config)}
            )
        except FolderInUse:
            if folder is not None:
                raise
    raise AssertionError("unreachable: there is always another folder")


def _default_folders(name: str) -> Iterator[Path]:
    first = Path("studies") / folder_name(name)
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in count(2))


def _as_texts(config: Any) -> dict[str, str]:
    """The configuration as texts, compared with that of a continued study."""
    names = [one.name for one in fields(config)] if is_dataclass(config) else list(getattr(config, "__dict__", ()))
    return {name: str(getattr(config, name)) for name in names}
