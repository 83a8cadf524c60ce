"""The other side of `run_objective.py`: the process of one trial.

Started as `python -m arborl.tune.run_trial`. Its first line of input is the run; after every evaluation it says how it
goes, and is told whether to stop. It ends when its input does: a study that is killed leaves no trials behind.
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
from arborl.tune.budget import a_step
from arborl.tune.trial import told

if TYPE_CHECKING:
    from arborl.trainer.trainer import Trainer
    from arborl.types import Group, Metrics


class Pruned(RunStopped):
    """The study has seen enough of this run."""


class Study:
    """The process that asked for this trial."""

    def __init__(self) -> None:
        self.out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever is printed from here on is for the log
        self.heard: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.heard.put(json.loads(line))
        os._exit(1)  # nobody is there any more

    def say(self, **words: Any) -> None:
        self.out.write(json.dumps(words) + "\n")
        self.out.flush()


class Reports:
    """After an evaluation on the way: tell the study how far the run is and what was measured, and obey."""

    def __init__(self, study: Study, metric: str):
        self.study, self.metric = study, metric

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        value = metrics.get(f"evaluation/{self.metric}")
        if value is None:
            return
        self.study.say(step=trainer.step * a_step(trainer.config), value=value)  # a clock that all trials share
        if self.study.heard.get()["stop"]:
            raise Pruned(f"Stopped at step {trainer.step}: trials before it were better here.")


def main() -> None:
    study = Study()
    order = study.heard.get()
    try:
        study.say(**_train(order, study))
    except BaseException as error:
        traceback.print_exc()
        study.say(error=told(error))
    sys.stdout.flush()
    os._exit(0)  # not even a thread that hangs keeps it


def _train(order: dict[str, Any], study: Study) -> dict[str, Any]:
    from arborl import training_run

    metric = order["metric"]
    reports = Reports(study, metric)
    try:
        run = training_run.train(validate(RunConfig, order["config"]), hooks=[reports])
    except Pruned:
        return {"value": float("nan")}  # what counts has been reported
    after = run.summary["after"]
    if metric in after:
        return {"value": after[metric]}
    if after["failed"] >= after["tasks"]:
        return {"error": f"all {after['tasks']:.0f} held-out episodes failed"}
    return {"has": sorted(name for name in after if not name.endswith(("_low", "_high")))}


if __name__ == "__main__":
    main()
