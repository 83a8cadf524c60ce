"""Checkpoints of trials: the best one's is worth keeping, and a study of fifty models would fill a disk."""

from __future__ import annotations

import shutil

from arborl.tune.summary import HPOSummary
from arborl.tune.trial import Plan, Trial


class KeepBest:
    """Told of every trial that has ended, leaves the checkpoints of the best so far alone."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.best: Trial | None = None

    def __call__(self, trial: Trial) -> None:
        beaten: Trial | None = trial
        if trial.state == "done" and trial.value is not None:
            former = self.best
            if former is None or former.value is None or self.plan.better(trial.value, former.value):
                self.best, beaten = trial, former
        if beaten is not None:
            self._drop(beaten)

    def finish(self, summary: HPOSummary) -> None:
        """Now all are known, those of other processes and earlier days too."""
        for trial in summary.trials:
            if trial.number != summary.best.number and trial.state != "running":
                self._drop(trial)

    def _drop(self, trial: Trial) -> None:
        shutil.rmtree(self.plan.folder_of(trial.number) / "checkpoints", ignore_errors=True)
