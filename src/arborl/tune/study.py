"""A study: a plan and an objective in; a folder with trials, a summary and pictures out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from arborl.errors import ConfigError, disk_errors
from arborl.tune.backends import Backend, find_backend
from arborl.tune.backends.backend import Tell
from arborl.tune.plots import draw
from arborl.tune.summary import HPOSummary, summarise, write_json
from arborl.tune.trial import Objective, Plan, Trial

SPACE = "search_space.json"
LOCK = ".lock"
MANY = 5
"""Differences that are told."""


async def search(
    plan: Plan,
    objective: Objective,
    backend: str | Backend = "optuna",
    about: Mapping[str, Any] | None = None,
    tell: Tell = lambda trial: None,
    metric: str = "reward",
) -> HPOSummary:
    """Try settings until the plan's number of trials is there.

    Args:
        plan: what is searched, and where the study is kept; one that is there already goes on.
        objective: tries a setting.
        backend: who chooses and runs: `optuna`, `ray_tune`, `wandb`, or one of your own.
        about: what else the trials depend on. A folder with another study is refused.
        tell: called with every trial that has ended.
        metric: what the objective's number is called.
    """
    chosen = find_backend(backend) if isinstance(backend, str) else backend
    settle_in(plan, {"metric": metric} | dict(about or {}))
    trials = await chosen.run(plan, objective, tell)
    return conclude(plan, trials, metric)


def conclude(plan: Plan, trials: list[Trial], metric: str) -> HPOSummary:
    """Write down what was found."""
    summary = summarise(plan, trials)
    write_json(plan.folder / "summary.json", {"metric": metric} | summary.as_dict())
    draw(plan, summary, metric)
    return summary


def settle_in(plan: Plan, about: Mapping[str, Any]) -> None:
    """The study's folder, made; or found to hold this very study."""
    space = {name: domain.as_dict() for name, domain in plan.space.items()}
    wanted = {"direction": plan.direction, **about, "space": space}
    path = plan.folder / SPACE
    with disk_errors(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and (inside := sorted(found.name for found in plan.folder.iterdir() if found.name != LOCK)):
        some = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        raise ConfigError(f"{plan.folder} holds other things: {some}. Give the study a new or an empty folder.")
    with FileLock(plan.folder / LOCK):  # another process may begin the same study in this moment
        if path.exists():
            _same(path, json.loads(json.dumps(wanted)))
        else:
            write_json(path, wanted)


def _same(path: Path, wanted: dict[str, Any]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not what a study wrote ({error}). Give the study another folder.") from error
    lines = [f"  {line}" for line in _differences(before, wanted)]
    if lines:
        more = [f"  … and {len(lines) - MANY} more"] if len(lines) > MANY else []
        told = "\n".join([*lines[:MANY], *more])
        raise ConfigError(
            f"{path.parent} holds another study, and trials of both cannot be compared:\n{told}\n"
            "Go on with the same settings, or give this study another folder."
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
