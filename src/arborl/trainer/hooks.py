"""Hooks that run after a step, and the checkpoint writer."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arborl import checkpoint
from arborl.errors import DiskWriteError
from arborl.learner.core.checkpoint_files import ShardedSnapshot, Snapshot
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.term_store import VALUE_COLUMNS, Columns, TermStore
from arborl.trainer.evaluation import EvaluationResult, HeldOutEvaluator
from arborl.trainer.trainer import CreditedBatch, Trainer
from arborl.types import Group, Ints, Metrics

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)

MAX_FAILED_WRITES = 3
"""Checkpoints in a row that cannot be written, after which the run ends."""
RESERVE_SECONDS = 1.0
"""How long a due checkpoint waits for memory that is being allocated."""
NUM_PROFILED_STEPS = 2
DEMONSTRATIONS = "demonstrations"
"""Folder of the demonstrations, beside the episode files."""
ShowEpisodes = Callable[[int, Sequence[Group]], Awaitable[object]]


class WriteEpisodes:
    """Write every episode of the step in the background, and the demonstrations that were trained on beside them. An
    error ends the run a step later. The file of a step may follow its metrics a moment later, and always precedes its
    checkpoint."""

    def __init__(self, folder: Path):
        self.store, self.demonstrations = EpisodeStore(folder), EpisodeStore(folder / DEMONSTRATIONS)
        self.background = checkpoint.BackgroundWriter("an episode file")
        self.latest: Future[Any] | None = None

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        self.background.start(partial(self._write, trainer.step, groups, trainer.demonstrations))
        self.latest = self.background.job

    def _write(self, step: int, groups: Sequence[Group], demonstrations: Sequence[Group]) -> None:
        self.store.write(step, groups)
        if demonstrations:
            self.demonstrations.write(step, demonstrations)

    def flush(self) -> None:
        """Wait until all files are written; raise if one could not be. May be called in any thread."""
        if self.latest is not None:
            self.latest.result()

    def close(self) -> None:
        self.background.close()


class Evaluate:
    """Evaluate held-out tasks every `every` steps, between the evaluations that the run itself does first and last."""

    def __init__(self, evaluator: HeldOutEvaluator, every: int, show: ShowEpisodes | None = None, also: int = 0):
        self.evaluator, self.every, self.show, self.also = evaluator, every, show, also

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        is_due = (self.every and trainer.step % self.every == 0) or trainer.step == self.also
        if is_due and trainer.step < trainer.num_steps:
            result = await self.measure(trainer)
            metrics.update(evaluation_step_metrics(result.metrics))
            trainer.failure_monitor.check("evaluation", trainer.step, result.episodes)

    async def measure(self, trainer: Trainer) -> EvaluationResult:
        await trainer.publish()
        result = await self.evaluator.measure()
        if self.show is not None:
            await self.show(trainer.step, result.groups)
        return result


def evaluation_step_metrics(metrics: Metrics) -> Metrics:
    return {f"evaluation/{name}": value for name, value in metrics.items()}


class RefreshReference:
    """After the demonstrations: the current policy becomes the reference model of the KL term."""

    def __init__(self, step: int):
        self.step = step

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if trainer.step == self.step:
            trainer.learner.update_reference()


class TrackEpisodes:
    """Send episodes of every `every`-th step, and of the first, to the tracker."""

    def __init__(self, every: int):
        self.every = every

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        track = getattr(trainer.tracker, "episodes", None)
        if track is not None and (trainer.step - 1) % self.every == 0:
            track([episode for group in groups for episode in group.episodes], trainer.step, "train")


class SaveCheckpoints:
    """Write a checkpoint every `every` steps, and at the last, in the background. If the disk is full, the next step is
    saved instead; the third failure in a row, and one of the last checkpoint, ends the run. The run waits only if the
    checkpoint before is still being written. Memory for the copies is allocated in the background after the first step,
    which takes long for large models; a checkpoint that is due earlier is written after the first step that finds the
    memory ready. With `keep_best` a step with a better value of that metric is saved too."""

    def __init__(
        self,
        root: Path,
        every: int,
        keep: int,
        extra: dict[str, Any],
        write_extra: Callable[[Path], None],
        flush: Callable[[], None] = lambda: None,
        also: Callable[[Sequence[int]], Collection[int]] = lambda steps: (),
        keep_best: str | None = None,
    ):
        self.root, self.every, self.keep, self.also = root, every, keep, also
        self.scores = checkpoint.CheckpointScores.read(root, keep_best) if keep_best is not None else None
        self.extra, self.write_extra, self.flush = extra, write_extra, flush
        self.background = checkpoint.BackgroundWriter()
        self.spent = {"time/checkpoint": 0.0, "time/checkpoint_written": 0.0}
        self.reported = dict(self.spent)
        self.is_first, self.is_reserving, self.due = True, False, False
        self.num_failed = 0
        """Writes in a row that the disk refused."""
        self.written: tuple[Path, dict[str, Any]] | None = None
        self.snapshot_times: dict[int, float] = {}
        """By step, when the weights of its checkpoint were copied."""

    def __call__(self, trainer: Trainer) -> None:
        with self._tolerating_disk_errors():
            self.background.raise_if_failed()
        is_last = trainer.step == trainer.num_steps
        if self.is_first:
            self.background.start(trainer.learner.reserve())
            self.is_first, self.is_reserving = False, True
        is_best = self.scores is not None and self.scores.add(trainer.step, trainer.metrics)
        self.due |= is_last or is_best or trainer.step % self.every == 0
        if self.due and (is_last or self._has_memory()):
            self._start(trainer)

    def seconds(self) -> Metrics:
        """Since the last call: how long the run waited for checkpoints, and how long writing them took."""
        before, self.reported = self.reported, dict(self.spent)
        return {name: seconds - before[name] for name, seconds in self.reported.items()}

    def save_now(self, trainer: Trainer) -> Path:
        """Write a checkpoint of the current state, unless there is one, and wait for it."""
        try:
            self.background.wait()
        except Exception as error:  # the run ends; the checkpoint written now is newer
            log.warning("a checkpoint could not be written: %s", error)
        if self.written is None or self.written[1] != self._state(trainer) or not self.written[0].is_dir():
            self._start(trainer)
            self.finish()
        assert self.written is not None
        return self.written[0]

    def finish(self) -> None:
        with self._waiting():
            self.background.wait()

    def close(self) -> None:
        self.background.close()

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        """A copy: the trainer's state changes while it is written."""
        state: dict[str, Any] = json.loads(json.dumps(trainer.state() | self.extra))
        return state

    def _has_memory(self) -> bool:
        with self._waiting():
            self.is_reserving = self.is_reserving and not self.background.wait(RESERVE_SECONDS)
        return not self.is_reserving

    def _start(self, trainer: Trainer) -> None:
        with self._waiting():
            with self._tolerating_disk_errors():
                self.background.wait()
            self.due = False
            state, snapshot = self._state(trainer), trainer.learner.snapshot()
            self.snapshot_times[trainer.step] = time.monotonic()
            self.background.start(partial(self._write, trainer.step, state, snapshot))
            if snapshot.live:
                with self._tolerating_disk_errors() if trainer.step < trainer.num_steps else nullcontext():
                    self.background.wait()

    @contextmanager
    def _tolerating_disk_errors(self) -> Iterator[None]:
        """A checkpoint that could not be written is written after the next step, `MAX_FAILED_WRITES` times."""
        try:
            yield
        except DiskWriteError as error:
            self.num_failed += 1
            if self.num_failed >= MAX_FAILED_WRITES:
                raise
            count = f"failure {self.num_failed} of {MAX_FAILED_WRITES}"
            log.warning("%s The next step is saved instead (%s).", error, count)
            self.due = True

    def _write(self, step: int, state: dict[str, Any], snapshot: Snapshot | ShardedSnapshot) -> None:
        start = time.perf_counter()

        def write(folder: Path) -> None:
            snapshot.write(folder)
            self.write_extra(folder / "model")
            self.flush()

        path = checkpoint.save(self.root, step, write, state, self.keep, self._kept)
        seconds = time.perf_counter() - start
        self.spent["time/checkpoint_written"] += seconds
        self.written, self.num_failed = (path, state), 0
        log.info("saved %s in %.1f s", path, seconds)

    def _kept(self, steps: Sequence[int]) -> Collection[int]:
        """Checkpoints that are kept besides the newest."""
        if self.scores is None:
            return self.also(steps)
        self.scores.write(self.root)
        best = self.scores.best(steps)
        return {*self.also(steps), *([best] if best is not None else [])}

    def rewind(self, step: int | None) -> None:
        """Remove the checkpoints of later steps, and all scores without a checkpoint. None: the run starts again;
        damaged checkpoints stay."""
        if step is not None:
            checkpoint.rewind(self.root, step)
        if self.scores is not None:
            self.scores.keep_only(checkpoint.complete_steps(self.root) if step is not None else ())

    def score_last(self, step: int, metrics: Metrics) -> None:
        """Record the evaluation at the end of the run, which follows its last checkpoint."""
        if self.scores is None:
            return
        self.scores.add(step, metrics)
        if not self.scores.values:
            log.warning("trainer.keep_best: no step has the metric %s", self.scores.metric)
        elif self.root.is_dir():
            self.scores.write(self.root)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent["time/checkpoint"] += time.perf_counter() - start


class WriteTerms:
    def __init__(self, folder: Path, max_terms: int):
        self.store, self.max_terms = TermStore(folder), max_terms

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if trainer.credited is not None:
            self.store.write(trainer.step, term_columns(trainer.credited, groups), self.max_terms)


def term_columns(batch: CreditedBatch, groups: Sequence[Group]) -> Columns:
    """The columns of a terms file: trained terms of episodes that are in the step's episode file."""
    terms, place = batch.terms, batch.terms.place
    assert place is not None
    episode, call, index = (column[place] for column in term_places(batch.groups, groups))
    numbers = {name: getattr(batch.log, name)[place] for name in ("logprob", "entropy", "ratio", "loss", "pull")}
    numbers |= {"advantage": terms.advantage, "weight": terms.weight}
    rows = (episode >= 0) & np.isfinite(numbers["logprob"])
    columns: Columns = {"episode": episode[rows], "call": call[rows], "index": index[rows]}
    return columns | {name: numbers[name][rows] for name in VALUE_COLUMNS}


def term_places(kept: Sequence[Group], groups: Sequence[Group]) -> tuple[Ints, Ints, Ints]:
    """Of each term: its episode in the file (-1 if absent), its call in the episode, its token in the call."""
    episodes = [episode for group in groups for episode in group.episodes]
    line = {id(episode): number for number, episode in enumerate(episodes)}
    rows = [
        (line.get(id(episode), -1), number, len(call.completion.tokens))
        for group in kept
        for episode in group.valid_episodes
        for number, call in enumerate(episode.calls)
        if call.trained
    ]
    lines, calls, counts = (np.asarray(column, dtype=np.int64) for column in zip(*rows, strict=True))
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(lines, counts), np.repeat(calls, counts), np.arange(counts.sum()) - starts


class ProfileSteps:
    """Write torch's profile of the second and third step of the process, in Chrome's trace format."""

    def __init__(self, path: Path):
        self.path = path
        self.first_step: int | None = None
        self.profile: profile | None = None

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if self.first_step is None:
            self.first_step = trainer.step
            if trainer.step < trainer.num_steps:
                self.profile = _torch_profile()
                self.profile.start()
            else:
                log.warning("--profile: the run has one step, and the first step is not traced. Write trainer.steps=3.")
        elif self.profile is not None and (
            trainer.step >= self.first_step + NUM_PROFILED_STEPS or trainer.step == trainer.num_steps
        ):
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.path))
            self.profile = None
            log.info("torch's trace of steps %d to %d is in %s", self.first_step + 1, trainer.step, self.path)


def _torch_profile() -> profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the learner has its own thread
    return profile(activities=activities, experimental_config=all_threads)
