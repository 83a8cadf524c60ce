"""Runs a study: from a plan and an objective to a folder with trials, summary and plots."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from arborl.errors import ConfigError, disk_errors
from arborl.tune.backends import Backend, OnTrialEnd, find_backend
from arborl.tune.plots import draw
from arborl.tune.trial import HPOSummary, Objective, StudyPlan, Trial, summarize_study, write_json

SPACE = "search_space.json"
LOCK = ".lock"
MAX_DIFFERENCES = 5


async def search(
    plan: StudyPlan,
    objective: Objective,
    backend: str | Backend = "optuna",
    about: Mapping[str, Any] | None = None,
    tell: OnTrialEnd = lambda trial: None,
    metric: str = "reward",
) -> HPOSummary:
    """Run trials until the plan's number is reached. An existing study in the plan's folder is resumed.

    Args:
        backend: chooses parameters and runs trials: `optuna`, `ray_tune`, `wandb`, or an object.
        about: what else the trials depend on; a folder with another study is refused.
        tell: called with every finished trial.
        metric: name of the objective's value.
    """
    chosen = find_backend(backend) if isinstance(backend, str) else backend
    open_study_folder(plan, {"metric": metric} | dict(about or {}))
    trials = await chosen.run(plan, objective, tell)
    return conclude(plan, trials, metric)


def conclude(plan: StudyPlan, trials: list[Trial], metric: str) -> HPOSummary:
    """Write summary.json and the plots."""
    summary = summarize_study(plan, trials)
    write_json(plan.folder / "summary.json", {"metric": metric} | summary.as_dict())
    draw(plan, summary, metric)
    return summary


def open_study_folder(plan: StudyPlan, about: Mapping[str, Any]) -> None:
    """Create the study's folder, or check that it holds this study."""
    space = {name: domain.as_dict() for name, domain in plan.space.items()}
    wanted = {"direction": plan.direction, **about, "space": space}
    path = plan.folder / SPACE
    with disk_errors(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and (inside := sorted(found.name for found in plan.folder.iterdir() if found.name != LOCK)):
        some = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        raise ConfigError(f"{plan.folder} holds other files: {some}. Use a new or an empty folder.")
    with FileLock(plan.folder / LOCK):  # another process may start the same study
        if path.exists():
            _same(path, json.loads(json.dumps(wanted)))
        else:
            write_json(path, wanted)


def _same(path: Path, wanted: dict[str, Any]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not the file of a study ({error}). Use another folder.") from error
    lines = [f"  {line}" for line in _differences(before, wanted)]
    if lines:
        more = [f"  … and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
        difference_lines = "\n".join([*lines[:MAX_DIFFERENCES], *more])
        raise ConfigError(
            f"{path.parent} holds another study, whose trials cannot be compared:\n{difference_lines}\n"
            "Resume with the same settings, or use another folder."
        )


def _differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict) and "type" not in before and "type" not in now:
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    else:
        yield f"{where}: {_shown(before)} there, {_shown(now)} here"


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


class KeepBestCheckpoint:
    """Deletes the checkpoints of finished trials, except those of the best so far."""

    def __init__(self, plan: StudyPlan):
        self.plan = plan
        self.best: Trial | None = None

    def __call__(self, trial: Trial) -> None:
        worse: Trial | None = trial
        if trial.state == "done" and trial.value is not None:
            previous = self.best
            if previous is None or previous.value is None or self.plan.better(trial.value, previous.value):
                self.best, worse = trial, previous
        if worse is not None:
            self._drop(worse)

    def finish(self, summary: HPOSummary) -> None:
        """Delete the checkpoints of all but the best trial, including those of other processes."""
        for trial in summary.trials:
            if trial.number != summary.best.number and trial.state != "running":
                self._drop(trial)

    def _drop(self, trial: Trial) -> None:
        shutil.rmtree(self.plan.trial_folder(trial.number) / "checkpoints", ignore_errors=True)
