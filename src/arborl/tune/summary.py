"""What a study found: the best setting, how the settings as they are did, and every trial."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arborl.errors import RunStopped, disk_errors
from arborl.tune.space import Params
from arborl.tune.trial import Direction, Plan, Trial

REASONS = 3
"""Reasons that are told where no trial came to an end."""


@dataclass(frozen=True, slots=True)
class HPOSummary:
    """A finished study."""

    best_params: Params
    best_reward: float
    """The best trial's number, whatever is searched for: a reward, a rate of success, a loss."""
    default_reward: float | None
    """That of the settings as they are, at the same budget; none where that trial failed."""
    trials: Sequence[Trial]
    folder: Path
    direction: Direction = "maximize"

    @property
    def best(self) -> Trial:
        """The best trial that came to its end; of equal ones the settings as they are, then the earliest."""
        return _best(self.trials, self.direction)

    @property
    def gain(self) -> float | None:
        """By how much the best beats the settings as they are, on what it was chosen by: somewhat too much, since the
        best of many is lucky too."""
        if self.default_reward is None:
            return None
        return (self.best_reward - self.default_reward) * (1 if self.direction == "maximize" else -1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "best_params": self.best_params,
            "best_reward": self.best_reward,
            "best_trial": self.best.number,
            "default_reward": self.default_reward,
            "gain": self.gain,
            "direction": self.direction,
            "trials": [asdict(trial) for trial in self.trials],
        }


def summarise(plan: Plan, trials: Sequence[Trial]) -> HPOSummary:
    """The study in one record; an error where there is nothing to choose from."""
    done = [trial for trial in trials if trial.state == "done" and trial.value is not None]
    if not done:
        failed = list(dict.fromkeys(trial.reason for trial in trials if trial.state == "failed"))
        reasons = "".join(f"\n  {reason}" for reason in failed[:REASONS])
        raise RunStopped(f"No trial of {len(trials)} came to its end, so there is no best setting.{reasons}")
    best = _best(done, plan.direction)
    default = next((trial.value for trial in done if trial.default), None)
    assert best.value is not None
    return HPOSummary(dict(best.params), best.value, default, list(trials), plan.folder, plan.direction)


def _best(trials: Sequence[Trial], direction: Direction) -> Trial:
    sign = 1 if direction == "maximize" else -1
    done = [trial for trial in trials if trial.state == "done" and trial.value is not None]
    return max(done, key=lambda trial: (sign * (trial.value or 0.0), trial.default, -trial.number))


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: another process may read or write it now."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        fresh.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
