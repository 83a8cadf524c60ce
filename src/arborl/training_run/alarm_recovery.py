"""What a run does when an alarm of the diagnosis holds (`trainer.on_alarm`): it stops, or rolls back.

A rollback is a restart from the last healthy checkpoint, as after the loss of a rank, with a lower learning rate. The
steps after that checkpoint are repeated; the files of the run contain each step once. `alarms.json` in the run folder
lists the rollbacks: written before anything is discarded, so that a kill at any moment loses no rollback.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl import checkpoint
from arborl.config.run_config import RunConfig
from arborl.diagnosis.alarms import EVIDENCE_STEPS, Alarm
from arborl.diagnosis.run_files import ALARMS_FILE
from arborl.errors import AlarmStopped, ConfigError, disk_errors
from arborl.track.folder_files import read_json
from arborl.types import Group, Metrics

if TYPE_CHECKING:
    from arborl.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rollback:
    alarm: str
    """Name of the rule."""
    step: int
    """The step at which it was raised."""
    first_step: int
    """The first step of its evidence."""
    detail: str
    to: int
    """The step of the checkpoint from which the run continued; 0: from the initial model."""
    lr_factor: float
    """Product of the factors of this rollback and all before."""
    done: bool = False
    """Whether the checkpoints after `to` are removed."""

    def __str__(self) -> str:
        start = f"the checkpoint of step {self.to}" if self.to else "the initial model"
        return (
            f"alarm {self.alarm} at step {self.step} ({self.detail}): back to {start}, learning rate times "
            f"{self.lr_factor:g}"
        )


class AlarmRecovery:
    """Decides between stop and rollback, and records rollbacks. As a hook it adds their number to the metrics."""

    def __init__(self, config: RunConfig):
        self.config, self.settings = config, config.trainer
        self.rollbacks: list[Rollback] = []
        self.stopped: Alarm | None = None

    @property
    def lr_factor(self) -> float:
        return self.rollbacks[-1].lr_factor if self.rollbacks else 1.0

    def load(self, home: Path) -> None:
        """Read the rollbacks of the run, and complete one that was interrupted."""
        self.rollbacks = read_rollbacks(home / ALARMS_FILE)
        if self.rollbacks and not self.rollbacks[-1].done:
            self._discard(home)

    def resumed(self, home: Path, step: int) -> list[str]:
        """The run resumes from this step. Forget rollbacks that are later than it: their steps are repeated. Returns
        messages for the console."""
        kept = max((number for number, one in enumerate(self.rollbacks, start=1) if one.to <= step), default=0)
        if kept < len(self.rollbacks):
            self.rollbacks = self.rollbacks[:kept]
            self._write(home)
        if not self.rollbacks:
            return []
        number, most = len(self.rollbacks), self.settings.max_rollbacks
        return [f"Rollback {number} of at most {most}: {self.rollbacks[-1]}."]

    def react(self, stopped: AlarmStopped, home: Path, can_restart: bool, max_factor: float = 1.0) -> None:
        """Roll back, or set the message with which the run stops. All checkpoints must be written. `max_factor` of the
        configured learning rate is the default rate: one that is still too high may damage the model without another
        alarm."""
        alarm: Alarm = stopped.alarm
        last_healthy = max(alarm.last_healthy_step - self.config.rollout.max_lag, 0)
        healthy = checkpoint.newest_usable(home / "checkpoints", last_healthy)
        to = int(healthy.name.removeprefix("step-")) if healthy is not None else 0
        reason = self._why_not(can_restart, healthy is not None or last_healthy < self.settings.save_every)
        if reason is None:
            factor = min(self.lr_factor * self.settings.rollback_lr_factor, max_factor)
            back = Rollback(alarm.rule.name, alarm.step, alarm.first_step, alarm.detail, to, factor)
            self.rollbacks.append(back)
            self._write(home)
            self._discard(home)
            default = ", which gives the default rate" if factor == max_factor else ""
            stopped.restarts, stopped.message = True, f"Rolled back: {back}{default}."
            log.warning("%s", stopped.message)
            return
        self.stopped = alarm
        stopped.message = self._stop_message(alarm, home, to, reason)

    def _why_not(self, can_restart: bool, has_start: bool) -> str | None:
        """Why the run stops instead of rolling back; empty if that is the setting."""
        if self.settings.on_alarm != "rollback":
            return ""
        if len(self.rollbacks) >= self.settings.max_rollbacks:
            return f" after {len(self.rollbacks)} rollbacks (trainer.max_rollbacks)"
        if not can_restart:
            return " without rollback, because another program started the ranks of the learner"
        return None if has_start else " without rollback, because no checkpoint from before its evidence is left"

    def _stop_message(self, alarm: Alarm, home: Path, to: int, reason: str) -> str:
        learner, factor = self.config.learner, 0.5
        rate = (
            f"learner.lr={learner.lr * factor:g}" if learner.lr else f"learner.lr_scale={learner.lr_scale * factor:g}"
        )
        if to:
            what = f"Resume from before:  arborl train --resume {to} output_dir={home} {rate}"
        else:
            what = f"No checkpoint is from before its evidence: start a new run in another output_dir, with {rate}."
        return (
            f"Stopped by the alarm {alarm.rule.name} at step {alarm.step}{reason}: {alarm.rule.summary}: "
            f"{alarm.detail}. The evidence begins at step {alarm.first_step}. {alarm.rule.advice} No checkpoint of "
            f"this state was saved.\n{what}"
        )

    def _discard(self, home: Path) -> None:
        checkpoint.rewind(home / "checkpoints", self.rollbacks[-1].to)
        self.rollbacks[-1].done = True
        self._write(home)

    def _write(self, home: Path) -> None:
        path = home / ALARMS_FILE
        fresh = path.with_name(f".{path.name}.tmp")
        with disk_errors(path):
            fresh.write_text(json.dumps({"rollbacks": self.summary()}, indent=2) + "\n", encoding="utf-8")
            os.replace(fresh, path)

    def summary(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.rollbacks]

    def keeps(self, steps: Sequence[int]) -> Collection[int]:
        """Checkpoints to keep besides the newest, so that one is from before the evidence of an alarm."""
        if self.settings.on_alarm == "warn":
            return ()
        return checkpoint.steps_around_age(steps, EVIDENCE_STEPS + self.config.rollout.max_lag)

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if self.settings.on_alarm == "rollback" or self.rollbacks:
            metrics["alarm/rollbacks"] = float(len(self.rollbacks))


def lr_factor(rollbacks: Sequence[Rollback], step: int) -> float:
    """The factor of the learning rate in the update of this step, which the files of the run contain."""
    return next((one.lr_factor for one in reversed(rollbacks) if one.to < step), 1.0)


def read_rollbacks(path: Path) -> list[Rollback]:
    if not os.path.lexists(path):
        return []
    try:
        rollbacks = [Rollback(**row) for row in read_json(path)["rollbacks"]]
        if not all(isinstance(one.to, int) and one.to >= 0 and 0 < one.lr_factor <= 1 for one in rollbacks):
            raise ValueError("a step below 0, or a factor that is not between 0 and 1")
        return rollbacks
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        raise ConfigError(
            f"{path}: not a list of rollbacks ({type(error).__name__}: {error}). It holds the factor of the learning "
            "rate; remove it to resume with the configured one."
        ) from error
