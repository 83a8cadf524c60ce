"""The process of one trial, started by `run_objective.py` as `python -m arborl.tune.run_trial`.

The first line of its input is the configuration; after every evaluation it writes a report and reads whether to stop.
It ends when its input ends, so that a killed study leaves no process behind.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TextIO

from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.errors import RunStopped
from arborl.tune.run_objective import episodes_per_step
from arborl.tune.trial import one_line_error

if TYPE_CHECKING:
    from arborl.trainer.trainer import Trainer
    from arborl.types import Group, Metrics


class TrialPruned(RunStopped):
    """The study stopped this trial."""


class StudyConnection:
    """Messages to and from the study's process, as lines of JSON."""

    def __init__(self) -> None:
        self.out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # printed text goes to the log
        self.messages: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.messages.put(json.loads(line))
        os._exit(1)  # the study has ended

    def send(self, **message: Any) -> None:
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()


class ReportEvaluations:
    """Hook: send the value of each evaluation to the study, and stop if it says so."""

    def __init__(self, study: StudyConnection, metric: str):
        self.study, self.metric = study, metric

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        value = metrics.get(f"evaluation/{self.metric}")
        if value is None:
            return
        self.study.send(step=trainer.step * episodes_per_step(trainer.config), value=value)
        if self.study.messages.get()["stop"]:
            raise TrialPruned(f"Stopped at step {trainer.step}: earlier trials were better at this point.")


def main() -> None:
    study = StudyConnection()
    request = study.messages.get()
    try:
        study.send(**_train(request, study))
    except BaseException as error:
        traceback.print_exc()
        study.send(error=one_line_error(error))
    sys.stdout.flush()
    os._exit(0)  # also if a thread hangs


def _train(request: dict[str, Any], study: StudyConnection) -> dict[str, Any]:
    from arborl import training_run

    metric = request["metric"]
    reports = ReportEvaluations(study, metric)
    try:
        run = training_run.train(validate(RunConfig, request["config"]), hooks=[reports])
    except TrialPruned:
        return {"value": float("nan")}  # the reported values count
    after = run.summary["after"]
    if metric in after:
        return {"value": after[metric]}
    if after["failed"] >= after["tasks"]:
        return {"error": f"all {after['tasks']:.0f} held-out episodes failed"}
    return {"has": sorted(name for name in after if not name.endswith(("_low", "_high")))}


if __name__ == "__main__":
    main()
