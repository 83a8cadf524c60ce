"""What happens after a step, one small object each."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from arborl import checkpoint
from arborl.learner.files import Snapshot
from arborl.learner.sharded_files import ShardedSnapshot
from arborl.rollout.store import EpisodeStore
from arborl.trainer.evaluate import Measured, Measures
from arborl.trainer.trainer import Trainer
from arborl.types import Group, Metrics

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that a run waits for memory which is being taken."""
Show = Callable[[int, Sequence[Group]], Awaitable[object]]


class KeepEpisodes:
    """Write every episode of the step, while the run goes on. A failure ends the run a step later.

    The file of a step may come a moment after its metrics, and is there before a checkpoint of the step is.
    """

    def __init__(self, folder: Path):
        self.store = EpisodeStore(folder)
        self.background = checkpoint.BackgroundWriter("an episode file")
        self.latest: Future[Any] | None = None

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        self.background.start(partial(self.store.write, trainer.step, groups))
        self.latest = self.background.job

    def flush(self) -> None:
        """Wait until all files are written; raise where one could not be. May be called in any thread."""
        if self.latest is not None:
            self.latest.result()

    def close(self) -> None:
        """The run is over, for whatever reason."""
        self.background.close()


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
        await trainer.publish()
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
    """Write a checkpoint every so many steps, and at the last, while the run goes on: it waits for the one before where
    that is still being written. A failure ends the run a step later.

    The memory for what is copied is taken after the first step, while the run goes on: of large models that takes as
    long as many copies. A checkpoint that is due before it is there is written after the first step that finds it.

    Args:
        root: the run's `checkpoints` folder.
        every: steps between two.
        keep: how many to keep.
        extra: more to remember (the evaluation before training, …).
        beside: writes further files into the model's folder, such as its tokenizer.
        flush: waits, in the thread that writes, for files that a checkpoint must not be ahead of.
    """

    def __init__(
        self,
        root: Path,
        every: int,
        keep: int,
        extra: dict[str, Any],
        beside: Callable[[Path], None],
        flush: Callable[[], None] = lambda: None,
    ):
        self.root, self.every, self.keep = root, every, keep
        self.extra, self.beside, self.flush = extra, beside, flush
        self.background = checkpoint.BackgroundWriter()
        self.spent = {"time/checkpoint": 0.0, "time/checkpoint_written": 0.0}
        self.told = dict(self.spent)
        self.first, self.taking, self.due = True, False, False
        self.written: tuple[Path, dict[str, Any]] | None = None
        """The last one, and what it remembers."""
        self.moments: dict[int, float] = {}
        """By step, when what a checkpoint holds was copied."""

    def __call__(self, trainer: Trainer) -> None:
        self.background.raise_if_failed()
        last = trainer.step == trainer.last
        if self.first:
            self.background.start(trainer.learner.reserve())
            self.first, self.taking = False, True
        self.due |= last or trainer.step % self.every == 0
        if self.due and (last or self._ready()):
            self._begin(trainer)

    def seconds(self) -> Metrics:
        """Since the last call: what the run waited for checkpoints, and what writing them took beside it."""
        before, self.told = self.told, dict(self.spent)
        return {name: seconds - before[name] for name, seconds in self.told.items()}

    def now(self, trainer: Trainer) -> Path:
        """Write one, whatever the step, and wait for it. One of this very state need not be written again."""
        try:
            self.background.wait()
        except Exception as error:  # the run ends; what is saved now is newer
            log.warning("a checkpoint is not written: %s", error)
        if self.written is None or self.written[1] != self._state(trainer) or not self.written[0].is_dir():
            self._begin(trainer)
            self.finish()
        assert self.written is not None
        return self.written[0]

    def finish(self) -> None:
        """Wait for what is being written."""
        with self._waiting():
            self.background.wait()

    def close(self) -> None:
        """The run is over, for whatever reason: nothing is being written when its folder is let go."""
        self.background.close()

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        """By value: what it is made of changes while it is written."""
        state: dict[str, Any] = json.loads(json.dumps(trainer.state() | self.extra))
        return state

    def _ready(self) -> bool:
        """Whether there is memory for a copy, or will be at once."""
        with self._waiting():
            self.taking = self.taking and not self.background.wait(PATIENCE)
        return not self.taking

    def _begin(self, trainer: Trainer) -> None:
        self.due = False
        with self._waiting():
            self.background.wait()
            state, snapshot = self._state(trainer), trainer.learner.snapshot()
            self.moments[trainer.step] = time.monotonic()
            self.background.start(partial(self._write, trainer.step, state, snapshot))
            if snapshot.live:
                self.background.wait()

    def _write(self, step: int, state: dict[str, Any], snapshot: Snapshot | ShardedSnapshot) -> None:
        began = time.perf_counter()

        def write(folder: Path) -> None:
            snapshot.write(folder)
            self.beside(folder / "model")
            self.flush()

        path = checkpoint.save(self.root, step, write, state, self.keep)
        took = time.perf_counter() - began
        self.spent["time/checkpoint_written"] += took
        self.written = path, state
        log.info("saved %s in %.1f s", path, took)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent["time/checkpoint"] += time.perf_counter() - began


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
