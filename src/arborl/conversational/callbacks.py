"""Callbacks of training. A callback can stop the run; its exceptions are logged and do not stop the run.

A callback is a function of the event's name and its data, plain or async; or an object with methods named after the
events, which get the data:

    on_train_start       steps
    on_episode_end       step, group: the conversations of one scenario (`TrajectoryGroup`)
    on_step_end          step, steps, metrics
    on_evaluation_end    step, metrics: of held-out scenarios
    on_checkpoint_saved  step, path
    on_train_end         steps, folder, summary

A callback that sets its attribute `should_abort` ends the run after that step, with a checkpoint; `abort_reason` is
logged.
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
from arborl.conversational.config import check_counts
from arborl.conversational.environment import TrajectoryGroup
from arborl.errors import ConfigError
from arborl.trainer.trainer import Trainer
from arborl.types import Group, Metrics

log = logging.getLogger("arborl.conversational")

EVENTS = ("train_start", "episode_end", "step_end", "evaluation_end", "checkpoint_saved", "train_end")
Callback = Callable[[str, Mapping[str, Any]], Any] | Any


class CallbackHook:
    """A hook of the trainer that calls the callbacks of a run."""

    def __init__(self, callbacks: Sequence[Callback], logging_steps: int = 10):
        for callback in callbacks:
            if inspect.isclass(callback):
                raise ConfigError(f"callbacks: {callback.__name__} is a class. Write {callback.__name__}().")
            if not callable(callback) and not any(hasattr(callback, f"on_{event}") for event in EVENTS):
                known = ", ".join(f"on_{event}" for event in EVENTS)
                raise ConfigError(f"callbacks: {callback!r} must be a function or have one of {known}.")
        self.callbacks, self.logging_steps = list(callbacks), logging_steps
        self.num_errors = 0
        self._saved: set[Path] | None = None

    async def emit(self, event: str, **data: Any) -> None:
        """Call all callbacks with an event."""
        for callback in self.callbacks:
            method = getattr(callback, f"on_{event}", None)
            try:
                if method is not None:
                    result = method(data)
                elif callable(callback):
                    result = callback(event, data)
                else:
                    continue
                if inspect.isawaitable(result):
                    await result
            except Exception as error:
                self.num_errors += 1
                name, kind = getattr(callback, "__name__", type(callback).__name__), type(error).__name__
                log.warning("callback %s failed at %s: %s: %s", name, event, kind, error, exc_info=error)

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        """Called by the trainer after a step."""
        for group in groups:
            await self.emit("episode_end", step=trainer.step, group=TrajectoryGroup.of(group))
        held_out = {name.removeprefix("evaluation/"): value for name, value in metrics.items() if "evaluation/" in name}
        if held_out:
            await self.emit("evaluation_end", step=trainer.step, metrics=held_out)
        await self.emit("step_end", step=trainer.step, steps=trainer.num_steps, metrics=dict(metrics))
        if trainer.step % self.logging_steps == 0:
            reward, flat = metrics.get("reward/mean", math.nan), metrics.get("group/zero_variance", math.nan)
            log.info("step %d of %d: reward %.3f, zero-variance %.3f", trainer.step, trainer.num_steps, reward, flat)
        await self.emit_checkpoints(trainer)
        metrics["callback/errors"] = float(self.num_errors)
        for callback in self.callbacks:
            if getattr(callback, "should_abort", False) and trainer.step < trainer.num_steps:
                reason = getattr(callback, "abort_reason", "") or "should_abort is set"
                log.warning("stopped after step %d: %s", trainer.step, reason)
                trainer.num_steps = trainer.step

    async def emit_checkpoints(self, trainer: Trainer) -> None:
        """Emit an event for each new checkpoint; those of an earlier part of the run are not new."""
        root: Path | None = getattr(trainer.save, "root", None)
        complete = set(checkpoint.complete_checkpoints(root)) if root is not None and root.is_dir() else set()
        known = complete if self._saved is None else self._saved
        await self._emit_saved(complete - known)
        self._saved = known | complete

    async def end(self, folder: Path, steps: int, summary: Mapping[str, Any]) -> None:
        """Emit the events of the last checkpoint and of the end."""
        await self._emit_saved(set(checkpoint.complete_checkpoints(folder / "checkpoints")) - (self._saved or set()))
        await self.emit("train_end", steps=steps, folder=folder, summary=summary)

    async def _emit_saved(self, paths: set[Path]) -> None:
        for path in sorted(paths):
            await self.emit("checkpoint_saved", step=int(path.name.rpartition("-")[2]), path=path)


class EarlyStoppingCallback:
    """Stops the run if a metric does not improve.

    Args:
        patience: measurements without improvement.
        metric: `reward/mean` (of the episodes of every step), `evaluation/reward`, or any other metric of a step.
        min_delta: minimum improvement.
        mode: whether the metric is maximized (`max`) or minimized (`min`).
    """

    def __init__(
        self,
        patience: int = 10,
        metric: str = "reward/mean",
        min_delta: float = 0.0,
        mode: Literal["max", "min"] = "max",
    ):
        check_counts("EarlyStoppingCallback", patience=patience)
        if mode not in ("max", "min"):
            raise ConfigError(f"EarlyStoppingCallback, mode={mode!r}: must be one of max, min.")
        self.patience, self.metric, self.min_delta, self.mode = patience, metric, min_delta, mode
        self.best: float | None = None
        self.num_without_improvement = 0
        self.should_abort, self.abort_reason = False, ""

    def on_step_end(self, data: Mapping[str, Any]) -> None:
        value = data["metrics"].get(self.metric)
        if value is None or math.isnan(value):
            return
        sign = 1.0 if self.mode == "max" else -1.0
        if self.best is None or sign * (value - self.best) > self.min_delta:
            self.best, self.num_without_improvement = value, 0
            return
        self.num_without_improvement += 1
        if self.num_without_improvement >= self.patience:
            self.should_abort = True
            count = self.num_without_improvement
            self.abort_reason = f"{self.metric} did not improve on {self.best:.4g} in {count} measurements"


class CheckpointCallback:
    """Copies the run's checkpoints to another folder, each with a complete model in `model/`.

    Args:
        save_dir: folder of the copies `step-000100`, ….
        save_steps: steps between checkpoints of the run, in place of `TrainingConfig.save_steps`.
        keep: number of copies; the oldest are removed. None keeps all.
    """

    def __init__(self, save_dir: str | Path = "./checkpoints", save_steps: int | None = None, keep: int | None = None):
        given = {name: value for name, value in (("save_steps", save_steps), ("keep", keep)) if value is not None}
        check_counts("CheckpointCallback", **given)
        self.save_dir, self.save_steps, self.keep = Path(save_dir).expanduser(), save_steps, keep
        self.saved: list[Path] = []

    def on_checkpoint_saved(self, data: Mapping[str, Any]) -> None:
        self.save_dir.mkdir(parents=True, exist_ok=True)
        target, partial = self.save_dir / data["path"].name, self.save_dir / f".{data['path'].name}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(data["path"], partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        self.saved = [*(path for path in self.saved if path != target), target]
        while self.keep is not None and len(self.saved) > self.keep:
            shutil.rmtree(self.saved.pop(0), ignore_errors=True)
