"""The rollout: episodes run concurrently, each with its own deadline. An episode that fails affects only itself."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

from arborl import sandbox
from arborl.agents.agent_interface import Agent, agent_name
from arborl.busy_time import BusyTime
from arborl.chat.json_schema import SchemaCompiler
from arborl.chat.renderer import Renderer
from arborl.data.reading.row_reader import OfflineTask
from arborl.engines.engine import Engine
from arborl.envs.env import Env
from arborl.errors import EpisodeError, EpisodeLimitReached, boundary
from arborl.failures import FirstFailureLogger
from arborl.registry import short_name
from arborl.rewards.reward import is_reward_call
from arborl.rollout.accounting import EpisodeAccounting
from arborl.rollout.deadlines import ENGINE, EventLoopWatchdog
from arborl.rollout.env_workers import Workers
from arborl.rollout.episode_store import BatchRecording
from arborl.rollout.groups import DEFAULT_OPTIONS, EpisodeObserver, GroupCollector, GroupOptions, count_metrics
from arborl.rollout.offline_episodes import OfflineEpisodes
from arborl.rollout.recorder import EpisodeLimits, RecordedEnv, Recorder
from arborl.spans import span
from arborl.tools.core.background_threads import abandoned_calls
from arborl.types import Call, Episode, Group, Metrics, Sampling, StopReason, Task

log = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 128
"""Concurrent episodes, if the engine does not report its capacity."""
DECREASE_FACTOR, DECREASE_SECONDS = 0.9, 0.25
"""Factor on the concurrency limit while the engine is overloaded, and the least time between two decreases."""
OVERLOAD_POLL_SECONDS = 0.005
EPISODE = "episode"
"""Component of the deadline of an episode."""
MANY_CALLS = 4
"""Model calls of an episode after which the agent, not the engine, is the reason that it does not end in time."""
GC_THRESHOLD = 250_000
"""Allocations between garbage collections while episodes run; Python's default is 700."""


@dataclass(frozen=True, slots=True)
class EpisodeFactories:
    """Functions that make the agent and the environment of a task, and its sampling parameters and limits."""

    agent: Callable[[Task], Agent]
    env: Callable[[Task], Env]
    sampling: Callable[[Task, Sampling], Sampling] = lambda task, run: run
    limits: Callable[[Task, EpisodeLimits], EpisodeLimits] = lambda task, run: run


class ConcurrencyLimit:
    """Admits a limited number of episodes at once, first come, first served. Without a fixed limit it adapts to the
    engine. It starts at the engine's capacity. It grows by one for each completed model call while it is reached and
    the engine is not overloaded, and shrinks while the engine has requests that it cannot serve. Episodes that wait for
    tools put no load on the engine, so slow tools lead to more episodes."""

    def __init__(
        self,
        limit: int | None,
        is_overloaded: Callable[[], bool],
        first: int = DEFAULT_CONCURRENCY,
        most: float = math.inf,
    ):
        self.adapts, self.limit = limit is None, float(limit or first)
        self.is_overloaded, self.most = is_overloaded, most
        self.num_running, self.last_decrease = 0, 0.0
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.polling = asyncio.Lock()

    async def wait_for_capacity(self) -> None:
        """Hold new episodes while the engine is overloaded. One waiter polls for all."""
        if self.is_overloaded():
            async with self.polling:
                while self.is_overloaded():
                    await asyncio.sleep(OVERLOAD_POLL_SECONDS)

    async def __aenter__(self) -> None:
        if self.num_running < int(self.limit) and not self.waiting:
            self.num_running += 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # admitted and cancelled at the same moment
                self._release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def on_completion(self) -> None:
        if not self.adapts:
            return
        if not self.is_overloaded():
            if self.num_running >= int(self.limit):
                self.limit = min(self.limit + 1, self.most)
                self._admit()
        elif time.monotonic() - self.last_decrease > DECREASE_SECONDS:
            self.limit = max(1.0, DECREASE_FACTOR * min(self.limit, self.num_running))
            self.last_decrease = time.monotonic()

    def _release(self) -> None:
        self.num_running -= 1
        self._admit()

    def _admit(self) -> None:
        while self.waiting and self.num_running < int(self.limit):
            first = self.waiting.popleft()
            if not first.done():  # else it is cancelled
                self.num_running += 1
                first.set_result(None)


class Rollout:
    """Runs episodes of tasks.

    Args:
        concurrency: concurrent episodes; None adapts to the engine.
        num_top_logprobs: alternatives that are recorded for each sampled token.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        factories: EpisodeFactories,
        sampling: Sampling,
        limits: EpisodeLimits,
        concurrency: int | None,
        workers: Workers | None = None,
        training: GroupOptions = DEFAULT_OPTIONS,
        recording: BatchRecording | None = None,
        offline: OfflineEpisodes | None = None,
        num_top_logprobs: int = 0,
    ):
        self.engine, self.renderer, self.factories = engine, renderer, factories
        self.sampling, self.limits, self.schemas = sampling, limits, SchemaCompiler(renderer.tokenizer)
        self.concurrency = concurrency
        self._limit: ConcurrencyLimit | None = None
        self._limit_loop: asyncio.AbstractEventLoop | None = None
        self.workers, self.training, self.recording = workers or Workers(), training, recording
        self.offline, self.num_top_logprobs = offline, num_top_logprobs
        self.counts: Counter[str] = Counter()
        self.firsts, self.dropped_failures = FirstFailureLogger(log), list[Episode]()
        self.agent_names: dict[str | None, str] = {}
        self.observer: EpisodeObserver | None = None
        """Receives the start and the end of every episode of a batch."""
        self.accounting = EpisodeAccounting()
        """Of the training episodes of the run."""
        self.engine_time = BusyTime()
        self.stuck_before = abandoned_calls.hanging()
        """Calls of other components of this process that hung before the rollout started."""

    def schema_masks(self, call: Call) -> Iterator[bytes]:
        """The tokens that the schema of a recorded call allowed, computed again."""
        stop = self.sampling.stop or self.renderer.stop
        return self.schemas.masks(call.schema, stop, call.completion.tokens)

    async def collect(
        self,
        tasks: Sequence[Task],
        seed: int,
        group_size: int,
        sampling: Mapping[str, Any] | None = None,
        options: GroupOptions = DEFAULT_OPTIONS,
        count: int | None = None,
        batch: int | None = None,
    ) -> list[Group]:
        """Run `group_size` episodes of every task. An episode depends on `seed`, its task and its number alone.

        Args:
            tasks: with a `count`, the tasks beyond it are spares for dropped groups.
            sampling: fields of `Sampling` that replace those of training, for all sources: `{"temperature": 0.0}`.
            batch: number of the training batch; None if the episodes are not trained and so not accounted for.
        """
        with self.running():
            await self.probe_envs(tasks)
            collector = self.collector(options, sampling, is_training=batch is not None)
            return await collector.collect(tasks, seed, group_size, count, batch or 0)

    def collector(
        self,
        options: GroupOptions | None = None,
        sampling: Mapping[str, Any] | None = None,
        is_training: bool = True,
    ) -> GroupCollector:
        """Collects groups with these options; by default those of training."""
        limit = self._concurrency_limit()

        async def play(task: Task, seed: int, name: str, on_start: Callable[[], None]) -> Episode:
            async with limit:
                await limit.wait_for_capacity()
                on_start()
                if self.observer is not None:
                    self.observer.on_start(task)
                return await self.play(task, seed, name, sampling)

        options = self.training if options is None else options
        accounting = self.accounting if is_training else None
        return GroupCollector(play, options, self.counts, self.dropped_failures, self.observer, accounting)

    async def probe_envs(self, tasks: Sequence[Task]) -> None:
        """Find out for each environment name where such environments may run, before the first episode."""
        for task in {task.env: task for task in tasks}.values():
            name = short_name(task.env) if task.env else None
            await self.workers.probe(partial(self.factories.env, task), name, self.limits.step_seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which episodes run: fewer garbage collections, and the event loop is watched."""
        with reduced_gc, EventLoopWatchdog():
            yield

    def is_whole_batch(self, tasks: Sequence[Task]) -> bool:
        """Whether `train` returns the batch of these tasks as a whole: it is offline, recorded or replayed."""
        return self.recording is not None or any(isinstance(task, OfflineTask) for task in tasks)

    async def train(
        self,
        tasks: Sequence[Task],
        seed: int,
        group_size: int,
        count: int,
        sampling: Mapping[str, Any] | None = None,
        batch: int | None = None,
    ) -> list[Group]:
        if any(isinstance(task, OfflineTask) for task in tasks):
            return self.offline_groups(tasks)

        async def play() -> list[Group]:
            # A baseline (`sampling`) is not filtered. Recorded groups are scored when they are trained on.
            options = replace(self.training, judge=None, score=self.training.score if self.training.keep else None)
            options = options if sampling is None else DEFAULT_OPTIONS
            return await self.collect(tasks, seed, group_size, sampling, options, count, batch)

        return await play() if self.recording is None else await self.recording.batch(seed, tasks, play)

    def offline_groups(self, tasks: Sequence[Task]) -> list[Group]:
        offline = [task for task in tasks if isinstance(task, OfflineTask)]
        return self.offline.groups(offline) if self.offline is not None else []

    def _concurrency_limit(self) -> ConcurrencyLimit:
        if self._limit is None or self._limit_loop is not asyncio.get_running_loop():
            most = DEFAULT_CONCURRENCY if self.workers.kind == "process" else math.inf  # one host has few processes
            first, engine = self._first_concurrency(), self.engine
            self._limit = ConcurrencyLimit(self.concurrency, lambda: engine.is_saturated, first, most)
            self._limit_loop = asyncio.get_running_loop()
            self.engine_time.after = self._limit.on_completion
        return self._limit

    def _first_concurrency(self) -> int:
        """The engine's capacity; the default if it reports none or if environments need threads or processes."""
        if self.workers.use_threads_or_processes:
            return DEFAULT_CONCURRENCY
        return max(DEFAULT_CONCURRENCY, self.engine.capacity)

    async def play(self, task: Task, seed: int, name: str, sampling: Mapping[str, Any] | None = None) -> Episode:
        """Run one episode. Failures are recorded in the episode."""
        episode = Episode(name, task, seed)
        start = time.perf_counter()
        default, limits = self.factories.sampling(task, self.sampling), self.factories.limits(task, self.limits)
        with span("arborl.episode", inside_arborl__episode=name, arborl__source=task.source or None) as trace:
            try:
                async with boundary(EPISODE, limits.episode_seconds):
                    await self._run_agent(episode, replace(default, **sampling) if sampling else default, limits)
            except EpisodeError as failure:
                error = attribute(failure, episode, self._agent_name(task), limits)
                episode.fail(error)
                self.firsts.tell(episode)
                trace.fail(f"{error.where}: {error.kind}")
            trace.note(
                arborl__stop=episode.stop.value, arborl__turns=len(episode.turns), arborl__sampled=episode.sampled
            )
            trace.end_when_scored(episode)
        episode.seconds = time.perf_counter() - start
        return episode

    async def _run_agent(self, episode: Episode, sampling: Sampling, limits: EpisodeLimits) -> None:
        task = episode.task
        name = short_name(task.env) if task.env else None
        async with boundary(f"environment {name!r}" if name else "environment of the run"):
            inner, name = await self.workers.place(partial(self.factories.env, task), name, limits.step_seconds)
        env = RecordedEnv(inner, name, limits, episode)
        drawn = sampling.drawn if sampling.drawn != self.sampling.drawn else None
        model = Recorder(
            self.engine, self.renderer, sampling, limits, episode, drawn, self.engine_time, self.num_top_logprobs
        )
        async with boundary(f"agent {task.agent!r}" if task.agent else "agent of the run"):
            agent = self.factories.agent(task)
        self.agent_names[task.agent] = agent_name(agent)
        async with boundary(f"agent {self._agent_name(task)!r}"):
            try:
                with closing(model):
                    await agent.run(task, env, model)
            except EpisodeLimitReached as over:
                episode.stop = StopReason(over.stop)
            except BaseException:
                with suppress(EpisodeError):  # the first failure is the one to report
                    await env.close()
                raise
            await env.close()
        await env.finish()

    def _agent_name(self, task: Task) -> str:
        return task.agent or self.agent_names.get(None, "of the run")

    def metrics(self) -> Metrics:
        """Since the last call: cancelled episodes, expired or filtered groups, abandoned threads, replaced processes,
        waiting time of the sandbox."""
        counts, self.counts = self.counts, Counter()
        stuck = abandoned_calls.hanging() - self.stuck_before
        num_stuck = sum(count for name, count in stuck.items() if not is_reward_call(name))
        limit = self._limit.limit if self._limit is not None else self.concurrency
        state = {
            "rollout/tool_calls_stuck": float(num_stuck),
            "rollout/concurrency": float(int(limit or self._first_concurrency())),
        }
        return count_metrics(counts) | self.workers.metrics() | sandbox.sandbox_metrics() | state

    def take_dropped_failures(self) -> list[Episode]:
        """Failed episodes of groups that were dropped since the last call; they are in no batch."""
        dropped, self.dropped_failures = self.dropped_failures, []
        return dropped

    def close(self) -> None:
        self.workers.close()


def attribute(error: EpisodeError, episode: Episode, agent: str, limits: EpisodeLimits) -> EpisodeError:
    """The error with the component that caused it, if another one raised it: an agent that never ends spends its time
    in the engine. A use of a coroutine is explained as a missing `await`."""
    cause, where = error.cause, error.where
    if isinstance(cause, AttributeError | TypeError) and "'coroutine'" in str(cause):
        calls = (
            "`await model.chat(…)`, `await env.reset(…)` and `await env.step(…)`" if where.startswith("agent") else ""
        )
        await_error = TypeError(f"`await` is missing before a call ({cause}){f'. Write {calls}' if calls else ''}")
        return EpisodeError(where, await_error.with_traceback(cause.__traceback__))
    num_calls = len(episode.calls)
    is_endless = where.startswith("agent") or (where == ENGINE and num_calls >= MANY_CALLS)
    if not is_endless or not isinstance(cause, TimeoutError) or not str(cause).startswith(EPISODE):
        return error
    seconds = sum(call.completion.seconds for call in episode.calls) / max(num_calls, 1)
    deadline_error = TimeoutError(
        f"it did not end within rollout.episode_seconds={limits.episode_seconds:g}: {num_calls} model calls of "
        f"{seconds:.2g} s and {len(episode.turns)} environment steps. Let it return, or write a larger "
        "rollout.episode_seconds"
    )
    return EpisodeError(f"agent {agent!r}", deadline_error.with_traceback(cause.__traceback__))


class ReducedGarbageCollection:
    """Raises the threshold of Python's garbage collector. Episodes are many small objects that live until the update;
    with the default threshold the collector takes a sixth of the rollout time."""

    def __init__(self) -> None:
        self.depth, self.before = 0, gc.get_threshold()

    def __enter__(self) -> None:
        if self.depth == 0:
            self.before = gc.get_threshold()
            gc.set_threshold(max(self.before[0], GC_THRESHOLD) if self.before[0] else 0, *self.before[1:])
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            gc.set_threshold(*self.before)


reduced_gc = ReducedGarbageCollection()
