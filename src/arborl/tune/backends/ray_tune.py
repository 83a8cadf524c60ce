"""Ray Tune: trials are tasks of a Ray cluster.

Ray samples the parameters at random, and stops a trial that is worse than the median of the others. It writes its own
files below the study's folder. A killed study is not resumed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.seeds import derive
from arborl.tune.backends import OnTrialEnd, missing_package
from arborl.tune.space import ChoiceDomain, Domain
from arborl.tune.trial import Objective, StudyPlan, Trial, TrialOutcome, run_trial_once

FOLDER = "ray"


class RayTuneBackend:
    """Hands the trials to `ray.tune`, `plan.jobs` at a time."""

    def __init__(self) -> None:
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the study prints its own lines
        os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # paths are relative to the study's working directory
        try:
            from ray import tune  # noqa: F401
        except ImportError as error:
            raise missing_package("ray_tune", "ray[tune]", "ray_tune", error) from error

    async def run(self, plan: StudyPlan, objective: Objective, tell: OnTrialEnd) -> list[Trial]:
        if (plan.folder / FOLDER).exists():
            raise ConfigError(
                f"{plan.folder} holds a study of Ray Tune, which cannot be resumed. Write another --study, or "
                "--backend optuna."
            )
        (plan.folder / FOLDER).mkdir(parents=True)
        plan = replace(plan, folder=plan.folder.resolve())
        with _connected(plan.jobs):
            first = _run_trials(plan, objective, True)
            tell(first[0])
            others = _run_trials(plan, objective, False) if plan.trials > 1 else []
        for trial in others:
            tell(trial)
        return [*first, *others]


@contextmanager
def _connected(jobs: int) -> Iterator[None]:
    """Connect to this process's cluster or that of `RAY_ADDRESS`; otherwise start a local one."""
    import ray

    from arborl.cluster.placement.ray_cluster import keep_signal_handlers

    is_owner = not ray.is_initialized()
    if is_owner:
        alone = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs, "include_dashboard": False}
        with keep_signal_handlers():
            ray.init(log_to_driver=False, logging_level="error", **alone)
    try:
        yield
    finally:
        if is_owner:
            ray.shutdown()


@dataclass(slots=True)
class RayReport:
    """Reports to Ray, which ends the process of a trial that it stops."""

    trial: int
    folder: Path
    last: dict[str, float] = field(default_factory=dict)

    def __call__(self, step: int, value: float) -> bool:
        from ray import tune

        self.last = {"value": value, "step": step}
        tune.report({**self.last, "state": "running", "reason": "", "seconds": 0.0})
        return False


def _run_trials(plan: StudyPlan, objective: Objective, default: bool) -> list[Trial]:
    """Run the unchanged settings, or all other trials."""
    from ray import tune
    from ray.tune.schedulers import MedianStoppingRule
    from ray.tune.search import BasicVariantGenerator

    begin = 0 if default else 1
    space = {} if default else {name: _domain(domain) for name, domain in plan.space.items()}
    numbers = {"_number": tune.grid_search(list(range(begin, 1 if default else plan.trials)))}
    mode = "max" if plan.direction == "maximize" else "min"
    scheduler = MedianStoppingRule("step", "value", mode, grace_period=0) if plan.pruning and not default else None

    def trainable(config: dict[str, Any]) -> None:
        report = RayReport(config["_number"], plan.trial_folder(config["_number"]))
        params = {name: config[name] for name in space}
        outcome: TrialOutcome = asyncio.run(run_trial_once(objective, params, report, lambda: False))
        value = outcome.value if outcome.value is not None else float("nan")
        step = int(report.last.get("step", 0)) + 1
        reported = {"state": outcome.state, "reason": outcome.reason, "seconds": outcome.seconds}
        tune.report({"value": value, "step": step, **reported})

    tuner = tune.Tuner(
        tune.with_resources(trainable, _share(plan.jobs)),
        param_space={**space, **numbers},
        tune_config=tune.TuneConfig(
            metric=None if scheduler else "value",
            mode=None if scheduler else mode,
            search_alg=BasicVariantGenerator(max_concurrent=plan.jobs, random_state=derive(plan.seed, "tune") % 2**32),
            scheduler=scheduler,
        ),
        run_config=tune.RunConfig(
            name="default" if default else "trials", storage_path=str(plan.folder / FOLDER), verbose=0
        ),
    )
    return [_trial(plan, number, result, default) for number, result in enumerate(tuner.fit(), begin)]


def _share(jobs: int) -> dict[str, float]:
    """Resources of a trial; without a share of a GPU it sees none."""
    import ray

    gpus = ray.cluster_resources().get("GPU", 0.0)
    return {"cpu": 1.0} | ({"gpu": min(1.0, gpus / jobs)} if gpus else {})


def _trial(plan: StudyPlan, number: int, result: Any, default: bool) -> Trial:
    """The result of a trial from its last report, which is missing if its process died."""
    reported, config = dict(result.metrics or {}), dict(result.config or {})
    config.pop("_number", None)
    state = reported.get("state", "failed")
    reason = reported.get("reason", "")
    if result.error is not None:
        state, reason = "failed", " ".join(str(result.error).split())[:500]
    elif state == "running":  # Ray stopped it
        state = "pruned"
    value = reported.get("value") if state in ("done", "pruned") else None
    seconds = round(reported.get("seconds") or reported.get("time_total_s", 0.0), 3)
    return plan.trial(number, config, TrialOutcome(state, value, reason, seconds), default)


def _domain(domain: Domain) -> Any:
    from ray import tune

    if isinstance(domain, ChoiceDomain):
        return tune.choice(list(domain.choices))
    if domain.whole:
        return tune.randint(int(domain.low), int(domain.high) + 1)
    return (tune.loguniform if domain.log else tune.uniform)(domain.low, domain.high)
