"""Sweeps of Weights & Biases: its server chooses (Bayesian search), this process tries.

Sweeps need the server and an account; there is no offline form of them. The settings as they are are tried first, here,
since a server cannot be told to begin with them.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.tune.backends.backend import Tell, missing
from arborl.tune.space import Choice, Domain
from arborl.tune.trial import Objective, Plan, Trial, attempt

PROJECT = "arborl-tune"


class WandbBackend:
    """A sweep in the project `$WANDB_PROJECT` (or `arborl-tune`), one trial after another.

    Args:
        service: what stands in for the package `wandb`.
    """

    def __init__(self, service: Any = None) -> None:
        if service is None:
            try:
                import wandb as service
            except ImportError as error:
                raise missing("wandb", "wandb", "wandb", error) from error
        self.wandb = service
        if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled"):
            raise ConfigError(
                "backend=wandb: there are no sweeps without the server, and WANDB_MODE="
                f"{os.environ['WANDB_MODE']}. Unset it, or write --backend optuna."
            )
        try:
            known, why = service.login(prompt=False), "nobody is logged in"
        except service.Error as error:
            known, why = False, f"it does not know this key ({error})"
        if not known:
            raise ConfigError(
                f"backend=wandb: sweeps are chosen by the server of Weights & Biases, and {why}. Write `wandb login`, "
                "or set WANDB_API_KEY; or write --backend optuna, which needs no account."
            )

    async def run(self, plan: Plan, objective: Objective, tell: Tell) -> list[Trial]:
        if plan.jobs > 1:
            raise ConfigError(f"jobs={plan.jobs}: backend=wandb tries one setting at a time. Leave --jobs out.")
        found: list[Trial] = []

        def tried(number: int, params: dict[str, Any], say: Any = None) -> None:
            found.append(_try(plan, objective, number, params, say))
            tell(found[-1])

        await asyncio.to_thread(tried, 0, {})
        if plan.trials == 1:
            return found
        name = os.environ.get("WANDB_PROJECT") or PROJECT
        sweep = self.wandb.sweep(sweep_of(plan), project=name)

        def one() -> None:
            with self.wandb.init() as run:
                tried(len(found), {key: run.config[key] for key in plan.space}, run.log)

        await asyncio.to_thread(self.wandb.agent, sweep, one, project=name, count=plan.trials - 1)
        return found


class WandbReport:
    """Tells the server, which may want the trial stopped by ending it from outside."""

    def __init__(self, number: int, folder: Path, say: Any):
        self.trial, self.folder, self.say = number, folder, say

    def __call__(self, step: int, value: float) -> bool:
        if self.say is not None:
            self.say({"value": value, "progress": step})
        return False


def _try(plan: Plan, objective: Objective, number: int, params: dict[str, Any], say: Any) -> Trial:
    folder = plan.folder_of(number)
    report = WandbReport(number, folder, say)
    outcome = asyncio.run(attempt(objective, params, report, lambda: False))
    if say is not None and outcome.value is not None:
        say({"value": outcome.value})
    where = str(folder.relative_to(plan.folder)) if folder.exists() else ""
    shown = dict(plan.default) if number == 0 else params
    return Trial(number, shown, outcome.state, outcome.value, outcome.reason, outcome.seconds, number == 0, where)


def sweep_of(plan: Plan) -> dict[str, Any]:
    """The plan in the words of a sweep."""
    return {
        "name": plan.folder.name,
        "method": "bayes",
        "metric": {"name": "value", "goal": plan.direction},
        "parameters": {name: _domain(domain) for name, domain in plan.space.items()},
        **({"early_terminate": {"type": "hyperband", "min_iter": 2}} if plan.pruning else {}),
    }


def _domain(domain: Domain) -> dict[str, Any]:
    if isinstance(domain, Choice):
        return {"values": list(domain.choices)}
    kind = "int_uniform" if domain.whole else "log_uniform_values" if domain.log else "uniform"
    return {"distribution": kind, "min": domain.low, "max": domain.high}
