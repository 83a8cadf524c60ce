"""The training loop. One step: collect, score, credit, update, publish."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from arborl.algorithms.recipe import Algorithm
from arborl.checkpoint import DamagedCheckpoint
from arborl.config.run_config import RunConfig
from arborl.data.task_source import TaskSource
from arborl.diagnosis.run_monitor import DiagnosisMonitor, FailureMonitor
from arborl.engines.engine import Engine
from arborl.errors import AlarmStopped
from arborl.learner.core.interface import UpdateInterrupted
from arborl.learner.core.learner import Learner
from arborl.learner.core.update_metrics import ROLLOUT_GAP, TermLog
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.rewards.reward import Rewards
from arborl.rollout.accounting import EpisodeAccounting, EpisodeKey
from arborl.rollout.pipeline import Pipeline
from arborl.rollout.runner import Rollout
from arborl.seeds import derive
from arborl.spans import end_open_spans, span
from arborl.track.tracker import Tracker
from arborl.trainer.step_metrics import SKIPPED_COUNTERS, episode_metrics
from arborl.trainer.system_usage import SystemUsage
from arborl.trainer.training_batch import credited_batch
from arborl.trainer.weight_probe import WeightSyncProbe
from arborl.types import Group, Metrics, Terms

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LOST_ENGINE_METRICS = ("engine/lost", "engine/retried", "engine/seconds_lost")
"""Reported with the next step, also if the loss happened between two steps."""


class Hook(Protocol):
    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        """Called when `trainer.step` steps are done; may add to `metrics`, which are logged afterwards."""
        ...


class CheckpointSaver(Protocol):
    def __call__(self, trainer: Trainer) -> None: ...

    def seconds(self) -> Metrics:
        """Time spent saving since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    groups: Sequence[Group]
    terms: Terms
    log: TermLog


class StageTimer:
    def __init__(self) -> None:
        self.seconds: Metrics = {}
        self.start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[f"time/{stage}"] = time.perf_counter() - start

    def metrics(self) -> Metrics:
        return self.seconds | {"time/step": time.perf_counter() - self.start}


class LearnerThread:
    """Runs functions one at a time, always in the same thread: while it computes, the event loop serves environments,
    tools, rewards and the engine."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self.cancelled = threading.Event()
        """Set if the task that waits for the function was cancelled."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function. A cancellation sets `cancelled`, and takes effect when the function has returned: an
        update is never half done. A function that gives up raises `UpdateInterrupted`."""
        return await self._run(torch.get_num_threads(), lambda: function(*args, **kwargs))

    async def run_beside_engine(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same while the event loop's thread computes too: each gets half of torch's threads. Two computations that
        both use all cores are slower than one after the other."""
        num_threads = torch.get_num_threads()
        num_learner_threads = max(1, num_threads // 2)
        torch.set_num_threads(max(1, num_threads - num_learner_threads))
        try:
            return await self._run(num_learner_threads, lambda: function(*args, **kwargs))
        finally:
            torch.set_num_threads(num_threads)

    async def _run(self, num_threads: int, function: Callable[[], T]) -> T:
        # A CPU computes denormal numbers (below 1e-38) a hundred times slower, and a diverged or very certain model
        # has millions of them in its gradients. In this thread they are flushed to zero.
        self.pool = self.pool or ThreadPoolExecutor(1, "arborl-learner", torch.set_flush_denormal, (True,))
        context, loop = contextvars.copy_context(), asyncio.get_running_loop()
        self.cancelled.clear()

        def run_in_thread() -> T:
            torch.set_num_threads(num_threads)  # per thread: a new thread does not inherit it
            return context.run(function)

        future: asyncio.Future[Any] = loop.run_in_executor(self.pool, run_in_thread)
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                self.cancelled.set()
        task, has_given_up = asyncio.current_task(), isinstance(future.exception(), UpdateInterrupted)
        if self.cancelled.is_set() and task is not None and not has_given_up:
            task.cancel()  # again: it takes effect at the next await
        return future.result()  # type: ignore[no-any-return]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None


class Trainer:
    """The parts of a run and its position: `step` of `num_steps` steps are done. Metrics, episodes, checkpoint and
    evaluation of the N-th update carry the number N. Step 0 is the start."""

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
        save: CheckpointSaver | None = None,
        steps: int | None = None,
    ):
        self.config, self.source, self.rollout, self.rewards = config, source, rollout, rewards
        self.algorithm, self.learner, self.engine, self.tracker = algorithm, learner, engine, tracker
        self.hooks, self.save = list(hooks), save
        self.probe = WeightSyncProbe(engine)
        self.failure_monitor = rollout.observer = FailureMonitor(config.env.name, config.model.name)
        self.accounting = rollout.accounting = EpisodeAccounting()
        self.outcomes: dict[EpisodeKey, str] = {}
        """Of the episodes of the last update."""
        self.diagnosis_monitor = DiagnosisMonitor()
        self.step = 0
        self.num_steps = steps or config.trainer.steps or 0
        sizes = config.rollout
        self.pipeline = Pipeline(
            rollout, source, config.seed, self.num_steps, sizes.group_size, sizes.tasks_per_step, sizes.spare_groups,
            sizes.max_lag,
        )  # fmt: skip
        self.thread = LearnerThread()
        learner.interrupt = self.thread.cancelled
        self.credited: CreditedBatch | None = None
        self.demonstrations: Sequence[Group] = ()
        """Those that the last update trained on beside its groups."""
        self.metrics: Metrics = {}
        """Of the last step."""
        self.train_seconds = 0.0
        self.idle_since = time.perf_counter()
        self.counting_since = self.idle_since
        """Start of the counters of the engine."""
        self.usage = SystemUsage()

    async def fit(self) -> None:
        self.idle_since = time.perf_counter()
        self.rollout.engine_time.busy()
        gc.freeze()  # objects of the libraries stay; scanning them stalls the engine
        try:
            await self.engine.load(self.learner.weights(), version=self.step)
            await self.probe.start()
            while self.step < self.num_steps:
                with span("arborl.step", inside_arborl__step=self.step + 1):
                    await self.train_step()
                end_open_spans()
        finally:
            await self.pipeline.close()
            self.accounting.end_run()
            self._resume_engine()
            self.thread.close()
            gc.unfreeze()

    async def train_step(self) -> None:
        """Collect groups, score them, credit their tokens, update the policy, publish its weights."""
        timer, seed = StageTimer(), derive(self.config.seed, "step", self.step)
        losses = self._reset_counters()
        with timer("rollout"):
            await self.pipeline.begin(self.step)  # outside the span: episodes belong to the step
            with span("arborl.wait"):
                groups = await self.pipeline.take(self.step)
            greedy = await self._collect_greedy(groups, seed) if self.algorithm.needs.greedy else []
        with timer("score"):
            await self._score(groups, greedy)
        with timer("learn"):
            self.demonstrations = self.rollout.offline_groups(self.source.beside(self.step))
            self.accounting.add(self.step, self.demonstrations)
            run_update = await self._pause_for_update()
            with span("arborl.learn"):
                metrics = self._sampling_metrics(timer, losses)
                metrics |= await self._run_update(run_update, groups)
        if not self.engine.follows_weights:  # its replies are not the policy's: there is no difference to report
            metrics = {name: value for name, value in metrics.items() if not name.startswith(ROLLOUT_GAP)}
        self.step += 1  # from here on the step is done, whatever interrupts
        self.accounting.settle(self.outcomes, metrics)
        self.pipeline.trained()
        self.accounting.check(self.pipeline.open_places())
        metrics |= self.accounting.metrics()
        self.source.observe_episodes(self.step - 1, self.accounting.take_finished())
        await self._report(groups, metrics, timer)
        if self.save is not None:  # after the metrics are written: a checkpoint is never ahead of them
            self.save(self)
        await self.publish(metrics)

    async def publish(self, metrics: Metrics | None = None) -> None:
        """Load the learner's weights into the engine; with the metrics of an update, check that they arrived."""
        with span("arborl.publish"):
            await self._pause_engine()
            await self.engine.load(self.learner.weights(), version=self.step)
            if metrics is not None:
                await self.probe.check(metrics)
            self._resume_engine()

    # -------------------------------------------------------------------------------------------- collect and score

    async def _collect_greedy(self, groups: Sequence[Group], seed: int) -> list[Group]:
        """One greedy episode per task: a baseline that is never trained on."""
        tasks = [group.task for group in groups]
        return await self.rollout.train(tasks, derive(seed, "greedy"), 1, len(tasks), {"temperature": 0.0})

    async def _score(self, groups: Sequence[Group], greedy: Sequence[Group]) -> None:
        await self.rewards.score([group for group in (*groups, *greedy) if not _is_scored(group)])
        for group, baseline in zip(groups, greedy, strict=False):
            group.greedy = baseline.valid_episodes[0].reward if baseline.valid_episodes else None

    # -------------------------------------------------------------------------------------------- credit and update

    async def _run_update(self, run: Callable[..., Awaitable[Metrics]], groups: Sequence[Group]) -> Metrics:
        """Credit and update. If the run is cancelled before the first optimizer step, the update is given up: nothing
        of it remains, and a checkpoint of the state before it can be written at once."""
        before = json.dumps(self.algorithm.state())
        try:
            metrics = await run(self._credit_and_update, groups, self.demonstrations)
        except UpdateInterrupted:
            self.algorithm.load_state(json.loads(before))
            self.credited = None
            log.info("the update of step %d was given up: it is repeated when the run resumes", self.step + 1)
            raise asyncio.CancelledError from None
        return metrics | self.source.observe(self.step, groups)

    def _credit_and_update(self, groups: Sequence[Group], demonstrations: Sequence[Group]) -> Metrics:
        """Runs in the learner's thread, while episodes of later steps are collected."""
        batch = credited_batch(
            self.algorithm, self.learner, self.config, [*groups, *demonstrations], self.step, self.rollout.schema_masks
        )
        metrics = episode_metrics(groups) | batch.metrics
        terms, self.outcomes = batch.terms, batch.outcomes
        self.learner.term_log = self.credited = None
        if self.config.track.terms and terms.place is not None and len(terms):
            self.learner.term_log = TermLog(1 + int(terms.place.max()))
            self.credited = CreditedBatch(batch.groups, terms, self.learner.term_log)
        metrics |= SKIPPED_COUNTERS | {"learner/threads": float(torch.get_num_threads())}
        return metrics | self.learner.update(batch.forest.trees, terms, self.algorithm, batch.episode_ids)

    async def _pause_for_update(self) -> Callable[..., Awaitable[Metrics]]:
        """Pause an engine that shares weights or device with the learner; returns how to run the update."""
        if self.engine.shares_weights:
            await self._pause_engine()
            await self.engine.sleep()
        beside = self.engine.shares_threads and self.pipeline.busy
        return self.thread.run_beside_engine if beside else self.thread.run

    async def _pause_engine(self) -> None:
        """The engine samples nothing until `_resume_engine`, if it can be paused."""
        if self.engine.can_pause:
            await self.engine.pause()
            self.rollout.engine_time.hold(True)

    def _resume_engine(self) -> None:
        if self.engine.can_pause:
            self.engine.resume()
            self.rollout.engine_time.hold(False)

    # -------------------------------------------------------------------------------------------- metrics

    def _reset_counters(self) -> Metrics:
        """Start counting for this step, if no group of it is sampled yet: samples since the last step (an evaluation)
        are dropped, lost engines kept."""
        if self.pipeline.slots:
            return {}
        self.rewards.busy_time.busy()
        self.counting_since = time.perf_counter()
        return {name: value for name, value in self.engine.metrics().items() if name in LOST_ENGINE_METRICS}

    def _sampling_metrics(self, timer: StageTimer, losses: Metrics) -> Metrics:
        """Counters of engine, rollout and rewards, including samples for later steps."""
        metrics = self.engine.metrics() | self.rollout.metrics() | self.rewards.metrics()
        metrics |= {name: metrics.get(name, 0.0) + value for name, value in losses.items()}
        seconds, now = timer.seconds["time/rollout"], time.perf_counter()
        if self.config.rollout.max_lag:  # `time/rollout` is only the wait: sampling went on during the last update
            seconds = now - self.counting_since
        self.counting_since = now
        rate = metrics.get("engine/sampled", 0.0) / max(seconds, 1e-9)
        return metrics | {"rollout/sampled_per_second": rate}

    async def _report(self, groups: Sequence[Group], metrics: Metrics, timer: StageTimer) -> None:
        """Run the hooks, log the metrics, warn of steps without learning. Raise if nearly every episode fails, or if an
        alarm holds."""
        self.train_seconds += timer.metrics()["time/step"]
        try:
            for hook in self.hooks:
                await hook.after(self, groups, metrics)
        finally:
            save_seconds = self.save.seconds() if self.save is not None else {}
            seconds = self._idle_seconds(timer) | timer.metrics() | save_seconds
            self.tracker.log(metrics | seconds | self.usage.metrics(), step=self.step)
        self.metrics = metrics
        for warning in self.diagnosis_monitor.add(metrics | {"step": self.step}):
            log.warning(warning)
        episodes = [episode for group in groups for episode in group.episodes]
        num_episodes = len(episodes) + int(metrics["rollout/filtered_episodes"])
        self.failure_monitor.check("step", self.step, [*episodes, *self.rollout.take_dropped_failures()], num_episodes)
        alarm = self.diagnosis_monitor.alarm() if self.config.trainer.on_alarm != "warn" else None
        if alarm is not None:  # before the checkpoint of this step
            raise AlarmStopped(alarm)

    def _idle_seconds(self, timer: StageTimer) -> Metrics:
        now = time.perf_counter()
        elapsed, self.idle_since = now - self.idle_since, now
        return {
            "time/idle_engine": max(elapsed - self.rollout.engine_time.busy(), 0.0),
            "time/idle_learner": max(elapsed - timer.seconds["time/learn"], 0.0),
        }

    # -------------------------------------------------------------------------------------------- checkpoint state

    def state(self) -> dict[str, Any]:
        """The run state of a checkpoint besides weights and optimizer; everything else follows from the seed."""
        return {
            "step": self.step,
            "train_seconds": self.train_seconds,
            "algorithm": self.algorithm.state(),
            "data": self.source.state(self.pipeline.first_untrained),
            "pipeline": self.pipeline.state(),
            "accounting": self.accounting.state(),
            "failures": self.failure_monitor.failures.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        try:
            self.step, self.train_seconds = int(state["step"]), float(state["train_seconds"])
            self.algorithm.load_state(state["algorithm"])
            self.source.load_state(state.get("data", {}))
            self.pipeline.load_state(state.get("pipeline", {}), self.step)
            self.accounting.load_state(state.get("accounting", {}))
            self.failure_monitor.failures.load_state(state.get("failures", []))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise DamagedCheckpoint(
                f"the checkpoint's state.json is not the state of such a run: {type(error).__name__}: {error}"
            ) from error


def _is_scored(group: Group) -> bool:
    """Whether the group was scored during collection, or replayed with its rewards."""
    return any(episode.judged or episode.rewards for episode in group.episodes)
