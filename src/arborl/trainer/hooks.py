"""What happens after a step, one small object each."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from arborl import checkpoint
from arborl.rollout.store import EpisodeStore
from arborl.trainer.evaluate import Measured, Measures
from arborl.trainer.trainer import Trainer
from arborl.types import Group, Metrics

log = logging.getLogger(__name__)

Show = Callable[[int, Sequence[Group]], Awaitable[object]]


class KeepEpisodes:
    """Write every episode of the step."""

    def __init__(self, folder: Path):
        self.store = EpisodeStore(folder)

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        self.store.write(trainer.step, groups)


class Evaluate:
    """Measure on held-out tasks every so many steps; before the first and after the last, the run does.

    Args:
        evaluator: measures.
        every: steps between two.
        show: given the step and the episodes of each evaluation.
        also: a step after which to measure, whatever `every` says; 0 for none.
    """

    def __init__(self, evaluator: Measures, every: int, show: Show | None = None, also: int = 0):
        self.evaluator, self.every, self.show, self.also = evaluator, every, show, also

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        due = (self.every and trainer.step % self.every == 0) or trainer.step == self.also
        if due and trainer.step < trainer.last:
            measured = await self.measure(trainer)
            metrics.update(named(measured.metrics))
            trainer.watch.look("evaluation", trainer.step, measured.episodes)

    async def measure(self, trainer: Trainer) -> Measured:
        """Measure the weights as they are now."""
        await trainer.engine.load(trainer.learner.weights(), version=trainer.step)
        measured = await self.evaluator.measure()
        if self.show is not None:
            await self.show(trainer.step, measured.groups)
        return measured


def named(measured: Metrics) -> Metrics:
    """Numbers of an evaluation as metrics of its step."""
    return {f"evaluation/{name}": value for name, value in measured.items()}


class RenewReference:
    """After the demonstrations: what the policy has become is what a KL penalty holds it to."""

    def __init__(self, step: int):
        self.step = step

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if trainer.step == self.step:
            trainer.learner.renew_reference()


class Save:
    """Write a checkpoint every so many steps, and at the last.

    Args:
        root: the run's `checkpoints` folder.
        every: steps between two.
        keep: how many to keep.
        extra: more to remember (the evaluation before training, …).
        beside: writes further files into the model's folder, such as its tokenizer.
    """

    def __init__(self, root: Path, every: int, keep: int, extra: dict[str, Any], beside: Callable[[Path], None]):
        self.root, self.every, self.keep = root, every, keep
        self.extra, self.beside = extra, beside

    def __call__(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 or trainer.step == trainer.last:
            self.now(trainer)

    def now(self, trainer: Trainer) -> Path:
        """Write one, whatever the step."""

        def write(folder: Path) -> None:
            trainer.learner.save(folder)
            self.beside(folder / "model")

        path = checkpoint.save(self.root, trainer.step, write, trainer.state() | self.extra, self.keep)
        log.info("saved %s", path)
        return path


class ShowEpisodes:
    """Show the tracker some episodes every so many steps, and the first.

    Args:
        every: steps between two.
    """

    def __init__(self, every: int):
        self.every = every

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        show = getattr(trainer.tracker, "episodes", None)
        if show is not None and (trainer.step - 1) % self.every == 0:
            show([episode for group in groups for episode in group.episodes], trainer.step, "train")
