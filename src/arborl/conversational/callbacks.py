"""Told of what happens in a run, and able to end it. An exception in a callback is reported and does not end the run.

A callback is a function of the event's name and its data, plain or async; or an object with methods named after the
events, each given the data:

    on_train_start       steps
    on_episode_end       step, group: the conversations of one scenario (`TrajectoryGroup`)
    on_step_end          step, steps, metrics
    on_evaluation_end    step, metrics: of held-out scenarios
    on_checkpoint_saved  step, path
    on_train_end         steps, folder, summary

One that sets its attribute `should_abort` ends the run after that step, with a checkpoint; `abort_reason` says why.
"""

from __future__ import annotations

import inspect
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from arborl import checkpoint
from arborl.conversational.trajectory import TrajectoryGroup
from arborl.errors import ConfigError
from arborl.trainer.trainer import Trainer
from arborl.types import Group, Metrics

log = logging.getLogger("arborl.conversational")

EVENTS = ("train_start", "episode_end", "step_end", "evaluation_end", "checkpoint_saved", "train_end")
Callback = Callable[[str, Mapping[str, Any]], Any] | Any


class Callbacks:
    """Tells the callbacks of a run. It is a hook of the trainer's.

    Args:
        callbacks: in the order in which they are told.
        logging_steps: steps between lines in the log.
    """

    def __init__(self, callbacks: Sequence[Callback], logging_steps: int = 10):
        for one in callbacks:
            if inspect.isclass(one):
                raise ConfigError(f"callbacks: {one.__name__} is a class. Write {one.__name__}().")
            if not callable(one) and not any(hasattr(one, f"on_{event}") for event in EVENTS):
                known = ", ".join(f"on_{event}" for event in EVENTS)
                raise ConfigError(f"callbacks: {one!r} is no function and has none of {known}.")
        self.callbacks, self.logging_steps = list(callbacks), logging_steps
        self.errors = 0
        self._saved: set[Path] | None = None

    async def tell(self, event: str, **data: Any) -> None:
        """Tell all of them."""
        for one in self.callbacks:
            method = getattr(one, f"on_{event}", None)
            try:
                if method is not None:
                    answer = method(data)
                elif callable(one):
                    answer = one(event, data)
                else:
                    continue
                if inspect.isawaitable(answer):
                    await answer
            except Exception as error:
                self.errors += 1
                name = getattr(one, "__name__", type(one).__name__)
                log.warning(
                    "callback %s failed at %s: %s: %s", name, event, type(error).__name__, error, exc_info=error
                )

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        """After a step."""
        for group in groups:
            await self.tell("episode_end", step=trainer.step, group=TrajectoryGroup.of(group))
        held_out = {name.removeprefix("evaluation/"): value for name, value in metrics.items() if "evaluation/" in name}
        if held_out:
            await self.tell("evaluation_end", step=trainer.step, metrics=held_out)
        await self.tell("step_end", step=trainer.step, steps=trainer.last, metrics=dict(metrics))
        if trainer.step % self.logging_steps == 0:
            shown = {
                "reward": metrics.get("reward/mean", math.nan),
                "flat": metrics.get("group/zero_variance", math.nan),
            }
            said = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
            log.info("step %d of %d: %s", trainer.step, trainer.last, said)
        await self.saved(trainer)
        metrics["callback/errors"] = float(self.errors)
        for one in self.callbacks:
            if getattr(one, "should_abort", False) and trainer.step < trainer.last:
                log.warning("stopped after step %d: %s", trainer.step, getattr(one, "abort_reason", "") or "asked to")
                trainer.last = trainer.step

    async def saved(self, trainer: Trainer) -> None:
        """Tell of checkpoints that have come since the last time; those of an earlier part of the run are not new."""
        root: Path | None = getattr(trainer.save, "root", None)
        there = set(checkpoint.complete_checkpoints(root)) if root is not None and root.is_dir() else set()
        known = there if self._saved is None else self._saved
        for path in sorted(there - known):
            await self.tell("checkpoint_saved", step=int(path.name.rpartition("-")[2]), path=path)
        self._saved = known | there

    async def end(self, folder: Path, steps: int, summary: Mapping[str, Any]) -> None:
        """The run is over: tell of its last checkpoint, and of the end."""
        for path in sorted(set(checkpoint.complete_checkpoints(folder / "checkpoints")) - (self._saved or set())):
            await self.tell("checkpoint_saved", step=int(path.name.rpartition("-")[2]), path=path)
        await self.tell("train_end", steps=steps, folder=folder, summary=summary)


class EarlyStoppingCallback:
    """Ends the run when a number has not become better for a while.

    Args:
        patience: times it is measured without becoming better.
        metric: `reward/mean` (of every step's own episodes), `evaluation/reward`, or any other metric of a step.
        min_delta: by how much it must become better to count.
        mode: `max` or `min`: which is better.
    """

    def __init__(
        self,
        patience: int = 10,
        metric: str = "reward/mean",
        min_delta: float = 0.0,
        mode: Literal["max", "min"] = "max",
    ):
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"EarlyStoppingCallback, patience={patience!r}: must be a whole number >= 1. Write 10.")
        if mode not in ("max", "min"):
            raise ConfigError(f"EarlyStoppingCallback, mode={mode!r}: must be one of max, min.")
        self.patience, self.metric, self.min_delta, self.mode = patience, metric, min_delta, mode
        self.best: float | None = None
        self.waited = 0
        self.should_abort, self.abort_reason = False, ""

    def on_step_end(self, data: Mapping[str, Any]) -> None:
        value = data["metrics"].get(self.metric)
        if value is None or math.isnan(value):
            return
        sign = 1.0 if self.mode == "max" else -1.0
        if self.best is None or sign * (value - self.best) > self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.should_abort = True
            self.abort_reason = f"{self.metric} has not been better than {self.best:.4g} for {self.waited} times"


class CheckpointCallback:
    """Keeps copies of the run's checkpoints elsewhere, each with a whole model in `model/`.

    Args:
        save_dir: where to; `step-000100` and so on are made in it.
        save_steps: steps between checkpoints of the run, in place of `TrainingConfig.save_steps`.
        keep: how many copies; the oldest go first. None keeps all.
    """

    def __init__(self, save_dir: str | Path = "./checkpoints", save_steps: int | None = None, keep: int | None = None):
        for name, value in (("save_steps", save_steps), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"CheckpointCallback, {name}={value!r}: must be a whole number >= 1, or None.")
        self.save_dir, self.save_steps, self.keep = Path(save_dir).expanduser(), save_steps, keep
        self.saved: list[Path] = []

    def on_checkpoint_saved(self, data: Mapping[str, Any]) -> None:
        self.save_dir.mkdir(parents=True, exist_ok=True)
        target, half = self.save_dir / data["path"].name, self.save_dir / f".{data['path'].name}"
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(data["path"], half)
        shutil.rmtree(target, ignore_errors=True)
        half.rename(target)
        self.saved = [*(path for path in self.saved if path != target), target]
        while self.keep is not None and len(self.saved) > self.keep:
            shutil.rmtree(self.saved.pop(0), ignore_errors=True)
