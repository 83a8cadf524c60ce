"""The training loop. One step is one paragraph: sample, score, credit, learn, publish."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from arborl.algorithms.algorithm import Algorithm
from arborl.checkpoint import DamagedCheckpoint
from arborl.config.run_config import RunConfig
from arborl.data.source import TaskSource
from arborl.engines.engine import Engine
from arborl.learner.group import LearnerGroup
from arborl.learner.learner import Learner
from arborl.learner.term_log import TermLog
from arborl.learner.update_metrics import GAP
from arborl.rewards.reward import Rewards
from arborl.rollout.downsample import thin
from arborl.rollout.pipeline import Pipeline
from arborl.rollout.runner import Rollout
from arborl.seeds import derive
from arborl.spans import end_open_spans, span
from arborl.track.tracker import Tracker
from arborl.trainer.diagnosis import Streak
from arborl.trainer.failing import FailureWatch
from arborl.trainer.look import look
from arborl.trainer.probe import SyncProbe
from arborl.trainer.summary import SKIPPED, describe_batch, summarize
from arborl.trainer.thread import LearnerThread
from arborl.types import Forest, Group, Metrics, Terms

log = logging.getLogger(__name__)

LOSSES = ("engine/lost", "engine/retried", "engine/seconds_lost")
"""What is told of an engine whenever it happened."""


class Hook(Protocol):
    """Something to do after a step. Each is one object in the list given to `Trainer`."""

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        """Called when `trainer.step` steps are done; may add to `metrics`, which are logged afterwards."""
        ...


class Saver(Protocol):
    """Keeps where the run stands."""

    def __call__(self, trainer: Trainer) -> None:
        """Called after every step, once its metrics are written."""
        ...

    def seconds(self) -> Metrics:
        """What saving took since the last call; part of the next step's metrics."""
        ...


@dataclass(frozen=True, slots=True)
class Credited:
    """What an update learned from, and what it made of that."""

    kept: Sequence[Group]
    """As they were planted."""
    terms: Terms
    log: TermLog


class Clock:
    """Seconds by stage.

    Example:
        with clock("rollout"):
            ...
        clock.seconds      # {"time/rollout": 1.2}
    """

    def __init__(self) -> None:
        self.seconds: Metrics = {}
        self.began = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[f"time/{stage}"] = time.perf_counter() - began

    def stop(self) -> Metrics:
        return self.seconds | {"time/step": time.perf_counter() - self.began}


class Trainer:
    """Holds the parts of a run and its position, `step`: how many steps are done, of `last` in all.

    Step N is the N-th update, done: its metrics, episodes, checkpoint and evaluation all carry N. Step 0 is the start.
    """

    def __init__(
        self,
        config: RunConfig,
        source: TaskSource,
        rollout: Rollout,
        rewards: Rewards,
        algorithm: Algorithm,
        learner: Learner | LearnerGroup,
        engine: Engine,
        tracker: Tracker,
        hooks: Sequence[Hook] = (),
        save: Saver | None = None,
        steps: int | None = None,
    ):
        self.config, self.source, self.rollout, self.rewards = config, source, rollout, rewards
        self.algorithm, self.learner, self.engine, self.tracker = algorithm, learner, engine, tracker
        self.hooks, self.save = list(hooks), save
        self.probe, self.watch, self.streak = SyncProbe(engine), FailureWatch(), Streak()
        self.step = 0
        self.last = steps or config.trainer.steps or 0
        played = config.rollout
        self.pipeline = Pipeline(
            rollout, source, config.seed, self.last, played.group_size, played.tasks_per_step, played.spare_groups,
            played.max_lag,
        )  # fmt: skip
        self.thread = LearnerThread()
        self.credited: Credited | None = None
        """What the last update learned from, where the configuration keeps it."""
        self.train_seconds = 0.0
        self.told = time.perf_counter()
        """When it was last said who was idle."""

    async def fit(self) -> None:
        """Train to the last step, from wherever `step` stands."""
        self.told = time.perf_counter()
        self.rollout.asked.busy()
        gc.freeze()  # what the libraries have made so far is here to stay; looking through it stalls the engine
        try:
            await self.engine.load(self.learner.weights(), version=self.step)
            await self.probe.ask()
            while self.step < self.last:
                with span("arborl.step", inside_arborl__step=self.step + 1):
                    await self.train_step()
                end_open_spans()
        finally:
            await self.pipeline.close()
            self._release()
            self.thread.close()
            gc.unfreeze()

    async def train_step(self) -> None:
        """Sample, score, credit, learn, publish."""
        clock, seed = Clock(), derive(self.config.seed, "step", self.step)
        between: Metrics = {}
        if not self.pipeline.busy:  # what was counted between steps (an evaluation, say) is not this step's
            between = {name: value for name, value in self.engine.metrics().items() if name in LOSSES}
            self.rewards.busy_time.busy()

        with clock("rollout"):
            await self.pipeline.begin(self.step)
            with span("arborl.wait"):
                groups = await self.pipeline.take(self.step)
            greedy = await self._greedy(groups, seed) if self.algorithm.needs.greedy else []
        with clock("score"):
            await self.rewards.score([group for group in (*groups, *greedy) if not _scored(group)])
            for group, alone in zip(groups, greedy, strict=False):
                group.greedy = alone.valid_episodes[0].reward if alone.valid_episodes else None
        with clock("learn"):
            beside = self.rollout.shown(self.source.beside(self.step))
            learn = await self._learning()
            with span("arborl.learn"):
                metrics = self._engine_metrics(clock, between) | await learn(self._learn, groups, beside, seed)
        if not self.engine.follows_weights:  # its replies are nobody's policy: there is nothing to agree about
            metrics = {name: value for name, value in metrics.items() if not name.startswith(GAP)}
        self.step += 1  # from here on the step counts as done, whatever interrupts
        self.pipeline.trained()

        self.train_seconds += clock.stop()["time/step"]
        try:
            for hook in self.hooks:
                await hook.after(self, groups, metrics)
        finally:
            saved = self.save.seconds() if self.save is not None else {}
            self.tracker.log(metrics | self._idle(clock) | clock.stop() | saved, step=self.step)
        self._look(groups, metrics)
        if self.save is not None:  # after its metrics are written, so that a checkpoint never knows more than they do
            self.save(self)
        await self.publish(metrics)

    async def publish(self, metrics: Metrics | None = None) -> None:
        """Give the engine the weights as they are; with what the learner said of their update, that is checked."""
        with span("arborl.publish"):
            await self._hold()
            await self.engine.load(self.learner.weights(), version=self.step)
            if metrics is not None:
                await self.probe.check(metrics)
            self._release()

    def _learn(self, groups: Sequence[Group], beside: Sequence[Group], seed: int) -> Metrics:
        """Credit and learn; in the learner's thread, while episodes of later steps are played."""
        kept, forest, terms = look(self.algorithm, self.learner, [*groups, *beside])
        metrics = summarize(groups) | self.source.observe(self.step, groups)  # now that all have failed that will
        terms = self.algorithm.credit(kept, terms)
        forest, terms, left_out = self._thinned(kept, forest, terms, derive(seed, "thin"))
        metrics |= describe_batch(forest, terms, self.step) | self.algorithm.metrics() | left_out
        names = [episode.id for group in kept for episode in group.valid_episodes]
        self.learner.log = self.credited = None
        if self.config.track.terms and terms.place is not None and len(terms):
            self.learner.log = TermLog(1 + int(terms.place.max()))
            self.credited = Credited(kept, terms, self.learner.log)
        return metrics | SKIPPED | self.learner.update(forest.trees, terms, self.algorithm, names)

    async def _learning(self) -> Callable[..., Awaitable[Metrics]]:
        """How to learn: while the engine, where weights or device are the learner's, samples nothing; or beside it."""
        if getattr(self.engine, "shared", True):
            await self._hold()
            if (sleep := getattr(self.engine, "sleep", None)) is not None:
                await sleep()
        threaded = getattr(self.engine, "threaded", False)
        return self.thread.beside if threaded and self.pipeline.busy else self.thread

    async def _hold(self) -> None:
        """Until `_release` the engine, where it can be held, samples nothing."""
        if (hold := getattr(self.engine, "hold", None)) is not None:
            await hold()
            self.rollout.asked.hold(True)

    def _release(self) -> None:
        if (release := getattr(self.engine, "release", None)) is not None:
            release()
            self.rollout.asked.hold(False)

    def _idle(self, clock: Clock) -> Metrics:
        """Since it was last asked: how long the engine had nothing to do, or had to wait, and how long the learner."""
        now = time.perf_counter()
        passed, self.told = now - self.told, now
        idle = {"time/idle_engine": passed - self.rollout.asked.busy(), "time/idle_learner": passed}
        idle["time/idle_learner"] -= clock.seconds["time/learn"]
        return {name: max(seconds, 0.0) for name, seconds in idle.items()}

    def _look(self, groups: Sequence[Group], metrics: Metrics) -> None:
        """Say so where nothing is learned; stop where nearly every episode fails, dropped groups included."""
        for said in self.streak.add(metrics | {"step": self.step}):
            log.warning(said)
        played = [episode for group in groups for episode in group.episodes]
        dropped = int(metrics["rollout/filtered_episodes"])
        self.watch.look("step", self.step, [*played, *self.rollout.failed_unseen()], len(played) + dropped)

    async def _greedy(self, groups: Sequence[Group], seed: int) -> list[Group]:
        """Each task once more, taking the likeliest tokens: a baseline, never trained on."""
        tasks = [group.task for group in groups]
        return await self.rollout.train(tasks, derive(seed, "greedy"), 1, len(tasks), {"temperature": 0.0})

    def _thinned(self, kept: Sequence[Group], forest: Forest, terms: Terms, seed: int) -> tuple[Forest, Terms, Metrics]:
        """What is trained: all branches, or, where the configuration says so, some of each episode, for all."""
        config = self.config.learner
        if config.max_samples_per_trajectory is None:
            return forest, terms, {}
        return thin(kept, terms, config.max_samples_per_trajectory, config.downsample_mode, seed)

    def _engine_metrics(self, clock: Clock, between: Metrics) -> Metrics:
        """What episodes of later steps have sampled meanwhile is told too, once; and who was lost `between` steps."""
        counted = self.engine.metrics() | self.rollout.metrics() | self.rewards.metrics()
        counted |= {name: counted.get(name, 0.0) + value for name, value in between.items()}
        rate = counted.get("engine/sampled", 0.0) / max(clock.seconds["time/rollout"], 1e-9)
        return counted | {"rollout/sampled_per_second": rate}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember besides weights and optimiser; everything else follows from the seed."""
        return {
            "step": self.step,
            "train_seconds": self.train_seconds,
            "algorithm": self.algorithm.state(),
            "data": self.source.state(self.pipeline.reached),
            "pipeline": self.pipeline.state(),
            "failures": self.watch.failures.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` said."""
        try:
            self.step, self.train_seconds = int(state["step"]), float(state["train_seconds"])
            self.algorithm.load_state(state["algorithm"])
            self.source.load_state(state.get("data", {}))
            self.pipeline.load_state(state.get("pipeline", {}), self.step)
            self.watch.failures.load_state(state.get("failures", []))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise DamagedCheckpoint(
                f"the checkpoint's state.json is not the state of such a run: {type(error).__name__}: {error}"
            ) from error


def _scored(group: Group) -> bool:
    """Whether it was scored when it was played, or is on tape with its rewards."""
    return any(episode.judged or episode.rewards for episode in group.episodes)
