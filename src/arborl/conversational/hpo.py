"""Hyper-parameter search for conversational agents: what `arborl tune` does for a file, for objects in Python."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from arborl.config.run_config import folder_name
from arborl.errors import ConfigError
from arborl.tune.named import get_search_space
from arborl.tune.space import Domain, Params, read_space
from arborl.tune.study import search
from arborl.tune.summary import HPOSummary
from arborl.tune.trial import Plan, Report, require_some

__all__ = ["HPOConfig", "HPOSummary", "get_search_space", "quick_hpo"]


class RunTrial(Protocol):
    """Trains a copy of the agent once with these parameters; returns the mean reward on held-out scenarios."""

    def __call__(
        self,
        agent: Any,
        environment: Any,
        reward_fn: Any,
        config: Any,
        params: Params,
        *,
        folder: Path,
        report: Report,
    ) -> Awaitable[float]: ...


@dataclass(frozen=True, slots=True)
class HPOConfig:
    """What is searched, and how; wrong values are errors when it is made.

    Example:
        HPOConfig(search_space={"learning_rate": {"type": "loguniform", "low": 1e-7, "high": 1e-4},
                                "num_generations": {"type": "categorical", "choices": [4, 8, 16]}}, n_trials=100)
    """

    search_space: Mapping[str, Any] | str = "grpo"
    """Names with what each may be, or the name of a space: see `get_search_space`."""
    n_trials: int = 50
    """In all, that of the configuration as it is included."""
    optimization_direction: Literal["maximize", "minimize"] = "maximize"
    pruning: bool = True
    """Stop trials that do worse on their way than the median of the others."""
    seed: int = 0
    """Of the search; trials have their own configuration's."""

    def __post_init__(self) -> None:
        require_some("n_trials", self.n_trials)
        self.plan(Path())

    @property
    def space(self) -> dict[str, Domain]:
        chosen = self.search_space
        return read_space(get_search_space(chosen) if isinstance(chosen, str) else chosen)

    def plan(self, folder: Path, default: Params | None = None) -> Plan:
        direction, pruning = self.optimization_direction, self.pruning
        return Plan(self.space, self.n_trials, folder, direction, pruning, self.seed, default=default or {})


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
    run_trial: RunTrial | None = None,
) -> HPOSummary:
    """Search for a better training configuration; every trial starts from the agent's weights as they are now.

    The first trial is `base_config` as it is. Called again with the same folder, a study that was stopped goes on.

    Example:
        summary = await quick_hpo(agent=agent, environment=environment, reward_function=reward_fn, base_config=config,
                                  n_trials=50)
        summary.best_params, summary.best_reward

    Args:
        agent, environment, reward_function, base_config: as for `train`.
        n_trials: in all; 50 where nobody says.
        backend: `optuna`, `ray_tune` or `wandb`.
        search_space: names with what each may be, or the name of a space; `grpo` where nobody says.
        hpo_config: both of them and more in one object.
        folder: where the study is kept; without one, `studies/` and the agent's class.
        run_trial: what trains instead of `arborl.conversational.training.trial`.
    """
    if hpo_config is not None and (n_trials is not None or search_space is not None):
        raise ConfigError("hpo_config says n_trials and search_space. Leave them out beside it.")
    asked = hpo_config or HPOConfig(search_space or "grpo", 50 if n_trials is None else n_trials)
    once = run_trial or _training()
    where = Path(folder) if folder is not None else Path("studies") / folder_name(type(agent).__name__)
    plan = asked.plan(where, {name: getattr(base_config, name, None) for name in asked.space})

    async def objective(params: Params, report: Report) -> float:
        return await once(agent, environment, reward_function, base_config, params, folder=report.folder, report=report)

    return await search(plan, objective, backend, {"base_config": _described(base_config)})


def _training() -> RunTrial:
    from arborl.conversational.training import trial  # needs torch, which what is wrong above need not wait for

    found: RunTrial = trial
    return found


def _described(config: Any) -> dict[str, str]:
    """What a configuration says, to be compared with that of a study which goes on."""
    names = [one.name for one in fields(config)] if is_dataclass(config) else list(getattr(config, "__dict__", ()))
    return {name: str(getattr(config, name)) for name in names}
