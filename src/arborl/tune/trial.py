"""Trials and studies: StudyPlan, Trial, objectives and HPOSummary."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from arborl.errors import ArborError, ConfigError, RunStopped, did_you_mean, disk_errors
from arborl.tune.space import Params, Space

Direction = Literal["maximize", "minimize"]
TrialState = Literal["done", "pruned", "failed", "lost", "running"]
"""`lost`: its process died. Such a trial does not count and is repeated."""


class TrialReport(Protocol):
    """Called by an objective with its progress and intermediate value; returns whether to stop."""

    @property
    def trial(self) -> int: ...

    @property
    def folder(self) -> Path:
        """The trial's folder; it does not exist yet."""
        ...

    def __call__(self, step: int, value: float) -> bool: ...


Objective = Callable[[Params, TrialReport], Awaitable[float]]
"""Returns the value of some parameters. Empty parameters are the unchanged settings."""


class StudyError(ConfigError):
    """An error that every trial would have."""


def require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number >= 1. Write {name}=1 or more.")


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """A study: search space, number of trials and folder."""

    space: Space
    trials: int
    """Total number, including the unchanged settings and the trials of a resumed study."""
    folder: Path
    direction: Direction = "maximize"
    pruning: bool = True
    """Stop a trial that is worse than the median of the others at the same point."""
    seed: int = 0
    jobs: int = 1
    """Trials at once."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """Values of the parameters in the unchanged settings, if known."""

    def __post_init__(self) -> None:
        require_positive("trials", self.trials)
        require_positive("jobs", self.jobs)
        if self.direction not in ("maximize", "minimize"):
            near = did_you_mean(str(self.direction), ("maximize", "minimize"))
            raise ConfigError(f"direction={self.direction!r} must be maximize or minimize.{near}")

    def trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:03}"

    def trial(self, number: int, params: Params, outcome: TrialOutcome, default: bool) -> Trial:
        """The record of a trial that has run."""
        folder = self.trial_folder(number)
        where = str(folder.relative_to(self.folder)) if folder.exists() else ""
        shown = dict(self.default) if default else dict(params)
        return Trial(number, shown, outcome.state, outcome.value, outcome.reason, outcome.seconds, default, where)

    def better(self, one: float, other: float) -> bool:
        return one > other if self.direction == "maximize" else one < other

    @property
    def known(self) -> Params:
        """The default values that lie in the search space."""
        return {
            name: self.default[name] for name, domain in self.space.items() if domain.contains(self.default.get(name))
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one trial."""

    number: int
    params: Params
    state: TrialState
    value: float | None = None
    """Final value; of a pruned trial the value where it stopped."""
    reason: str = ""
    """Why it failed."""
    seconds: float = 0.0
    default: bool = False
    """Whether it ran the unchanged settings."""
    folder: str = ""
    """Path within the study's folder."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How one execution of an objective ended."""

    state: TrialState
    value: float | None
    reason: str
    seconds: float


async def run_trial_once(
    objective: Objective, params: Params, report: TrialReport, stopped: Callable[[], bool]
) -> TrialOutcome:
    """Run the objective. An error fails this trial only, unless it is a `StudyError`."""
    start = time.monotonic()

    def outcome(state: TrialState, value: float | None = None, reason: str = "") -> TrialOutcome:
        return TrialOutcome(state, value, reason, round(time.monotonic() - start, 3))

    try:
        value = float(await objective(dict(params), report))
    except (StudyError, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        if stopped():  # one way to stop is to raise
            return outcome("pruned")
        return outcome("failed", None, one_line_error(error))
    if stopped():
        return outcome("pruned", value if math.isfinite(value) else None)
    return outcome("done", value) if math.isfinite(value) else outcome("failed", None, f"its value is {value}")


def one_line_error(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    message = text if isinstance(error, ArborError) else f"{type(error).__name__}: {text}".rstrip(": ")
    return message if len(message) <= 500 else message[:497] + "..."


MAX_REASONS = 3


@dataclass(frozen=True, slots=True)
class HPOSummary:
    """A finished study."""

    best_params: Params
    best_reward: float
    """Value of the best trial: a reward, a success rate, a loss."""
    default_reward: float | None
    """Value of the unchanged settings at the same budget; None if that trial failed."""
    trials: Sequence[Trial]
    folder: Path
    direction: Direction = "maximize"

    @property
    def best(self) -> Trial:
        """The best finished trial; of equal ones the unchanged settings, then the earliest."""
        return _best(self.trials, self.direction)

    @property
    def gain(self) -> float | None:
        """Difference between the best trial and the unchanged settings. Biased upwards: the best of many is lucky."""
        if self.default_reward is None:
            return None
        return (self.best_reward - self.default_reward) * (1 if self.direction == "maximize" else -1)

    def as_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("best_params", "best_reward", "default_reward")}
        more = {"best_trial": self.best.number, "gain": self.gain, "direction": self.direction}
        return fields | more | {"trials": [asdict(trial) for trial in self.trials]}


def summarize_study(plan: StudyPlan, trials: Sequence[Trial]) -> HPOSummary:
    """The summary of a study; an error if no trial finished."""
    done = [trial for trial in trials if trial.state == "done" and trial.value is not None]
    if not done:
        failed = list(dict.fromkeys(trial.reason for trial in trials if trial.state == "failed"))
        reasons = "".join(f"\n  {reason}" for reason in failed[:MAX_REASONS])
        raise RunStopped(f"None of {len(trials)} trials finished, so there are no best parameters.{reasons}")
    best = _best(done, plan.direction)
    default = next((trial.value for trial in done if trial.default), None)
    assert best.value is not None
    return HPOSummary(dict(best.params), best.value, default, list(trials), plan.folder, plan.direction)


def _best(trials: Sequence[Trial], direction: Direction) -> Trial:
    sign = 1 if direction == "maximize" else -1
    done = [trial for trial in trials if trial.state == "done" and trial.value is not None]
    return max(done, key=lambda trial: (sign * (trial.value or 0.0), trial.default, -trial.number))


def write_json(path: Path, value: Any) -> None:
    """Atomic: another process may read or write the file."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        fresh.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
