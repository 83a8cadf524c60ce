"""Sweeps of Weights & Biases: its server chooses parameters (Bayesian search), this process runs the trials.

Sweeps need the server and an account. The unchanged settings run first, outside the sweep.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.tune.backends import OnTrialEnd, missing_package
from arborl.tune.space import ChoiceDomain, Domain
from arborl.tune.trial import Objective, StudyPlan, Trial, run_trial_once

PROJECT = "arborl-tune"


class WandbBackend:
    """A sweep in the project `$WANDB_PROJECT` (or `arborl-tune`), one trial after another."""

    def __init__(self, service: Any = None) -> None:
        if service is None:
            try:
                import wandb as service
            except ImportError as error:
                raise missing_package("wandb", "wandb", "wandb", error) from error
        self.wandb = service
        if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled"):
            raise ConfigError(
                "backend=wandb: sweeps need the server, but WANDB_MODE="
                f"{os.environ['WANDB_MODE']}. Unset it, or write --backend optuna."
            )
        try:
            is_logged_in, why = service.login(prompt=False), "no user is logged in"
        except service.Error as error:
            is_logged_in, why = False, f"it refuses this key ({error})"
        if not is_logged_in:
            raise ConfigError(
                f"backend=wandb: sweeps need the server of Weights & Biases, and {why}. Write `wandb login`, "
                "or set WANDB_API_KEY; or write --backend optuna, which needs no account."
            )

    async def run(self, plan: StudyPlan, objective: Objective, tell: OnTrialEnd) -> list[Trial]:
        if plan.jobs > 1:
            raise ConfigError(f"jobs={plan.jobs}: backend=wandb runs one trial at a time. Leave --jobs out.")
        trials: list[Trial] = []

        def run_one(number: int, params: dict[str, Any], say: Any = None) -> None:
            trials.append(_try(plan, objective, number, params, say))
            tell(trials[-1])

        await asyncio.to_thread(run_one, 0, {})
        if plan.trials == 1:
            return trials
        name = os.environ.get("WANDB_PROJECT") or PROJECT
        sweep = self.wandb.sweep(sweep_of(plan), project=name)

        def one() -> None:
            with self.wandb.init() as run:
                run_one(len(trials), {key: run.config[key] for key in plan.space}, run.log)

        await asyncio.to_thread(self.wandb.agent, sweep, one, project=name, count=plan.trials - 1)
        return trials


class WandbReport:
    """Reports to the server, which may end the process of a trial."""

    def __init__(self, number: int, folder: Path, say: Any):
        self.trial, self.folder, self.say = number, folder, say

    def __call__(self, step: int, value: float) -> bool:
        if self.say is not None:
            self.say({"value": value, "progress": step})
        return False


def _try(plan: StudyPlan, objective: Objective, number: int, params: dict[str, Any], say: Any) -> Trial:
    report = WandbReport(number, plan.trial_folder(number), say)
    outcome = asyncio.run(run_trial_once(objective, params, report, lambda: False))
    if say is not None and outcome.value is not None:
        say({"value": outcome.value})
    return plan.trial(number, params, outcome, number == 0)


def sweep_of(plan: StudyPlan) -> dict[str, Any]:
    """The plan as a sweep configuration."""
    return {
        "name": plan.folder.name,
        "method": "bayes",
        "metric": {"name": "value", "goal": plan.direction},
        "parameters": {name: _domain(domain) for name, domain in plan.space.items()},
        **({"early_terminate": {"type": "hyperband", "min_iter": 2}} if plan.pruning else {}),
    }


def _domain(domain: Domain) -> dict[str, Any]:
    if isinstance(domain, ChoiceDomain):
        return {"values": list(domain.choices)}
    kind = "int_uniform" if domain.whole else "log_uniform_values" if domain.log else "uniform"
    return {"distribution": kind, "min": domain.low, "max": domain.high}
