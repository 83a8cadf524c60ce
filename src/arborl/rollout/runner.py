"""Episodes are played concurrently, each under its own deadline; one that breaks costs itself and is named."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from arborl import sandbox
from arborl.agents.agent import Agent
from arborl.busy_time import BusyTime
from arborl.chat.renderer import Renderer
from arborl.data.reading.given import GivenTask
from arborl.engines.engine import Engine
from arborl.envs.env import Env
from arborl.errors import EpisodeError, EpisodeLimitReached, boundary
from arborl.failures import FirstFailureLogger
from arborl.registry import short_name
from arborl.rewards.reward import of_reward
from arborl.rollout.given import GivenEpisodes
from arborl.rollout.groups import PLAIN, Manager, Manner, named
from arborl.rollout.recorder import Limits, RecordedEnv, Recorder
from arborl.rollout.replay import Tape
from arborl.rollout.slots import FIRST, Slots
from arborl.rollout.watchdog import Watchdog
from arborl.rollout.workers import Workers
from arborl.spans import span
from arborl.tools.threads import left_behind
from arborl.types import Episode, Group, Metrics, Sampling, StopReason, Task

log = logging.getLogger(__name__)

CROWDED = 0.005
"""Seconds between two looks at a crowded engine."""
COLLECT = 250_000
"""New objects after which Python looks for garbage while episodes are played; its own number is 700."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays: makers of a fresh agent and a fresh environment for a task."""

    agent: Callable[[Task], Agent]
    env: Callable[[Task], Env]
    sampling: Callable[[Task, Sampling], Sampling] | None = None
    """What the task's source samples differently, given what the run does."""
    limits: Callable[[Task, Limits], Limits] | None = None
    """What an episode of the task's source may take, given what the run allows."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where episodes wait to begin."""

    loop: asyncio.AbstractEventLoop
    slots: Slots
    door: asyncio.Lock


class Rollout:
    """Plays tasks.

    Example:
        groups = await rollout.collect(tasks, seed=derive(run_seed, "step", 3), group_size=8)

    Args:
        engine, renderer: the model.
        cast: who plays.
        sampling: how tokens are drawn, where nothing else is said.
        limits: of an episode.
        concurrency: episodes in flight; None for as many as the engine can serve.
        workers: where environments run.
        training: how the groups of a training batch are made.
        tape: records training batches, or has them on record.
        given: makes episodes of tasks that say what was said.
        rivals: likeliest other tokens that are noted beside each one.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        cast: Cast,
        sampling: Sampling,
        limits: Limits,
        concurrency: int | None,
        workers: Workers | None = None,
        training: Manner = PLAIN,
        tape: Tape | None = None,
        given: GivenEpisodes | None = None,
        rivals: int = 0,
    ):
        self.engine, self.renderer, self.cast = engine, renderer, cast
        self.sampling, self.limits = sampling, limits
        self.concurrency = concurrency
        self._line: Line | None = None
        self.workers, self.training, self.tape = workers or Workers(), training, tape
        self.given, self.rivals = given, rivals
        self.counts: Counter[str] = Counter()
        self.firsts, self.lost = FirstFailureLogger(log), list[Episode]()
        self.asked = BusyTime()
        self.hung = left_behind.stuck()
        """Calls of others in this process, which hang already."""

    async def collect(
        self,
        tasks: Sequence[Task],
        seed: int,
        group_size: int,
        sampling: Mapping[str, Any] | None = None,
        manner: Manner = PLAIN,
        count: int | None = None,
    ) -> list[Group]:
        """Play every task `group_size` times. Episodes depend on `seed`, their task and their number; nothing else.

        Args:
            tasks: what to play. With a `count`, those beyond it are spares for groups that are dropped.
            seed: of the batch.
            group_size: episodes of a task.
            sampling: fields of `Sampling` that are not as in training, for all sources: `{"temperature": 0.0}`.
            manner: how groups are made.
            count: groups to end up with; without one, as many as tasks.
        """
        with self.playing():
            await self.meet(tasks)
            return await self.manager(manner, sampling).collect(tasks, seed, group_size, count)

    def manager(self, manner: Manner | None = None, sampling: Mapping[str, Any] | None = None) -> Manager:
        """Makes groups in this manner, or in the training's."""
        line = self._in_line()

        async def play(task: Task, own: int, name: str, begin: Callable[[], None]) -> Episode:
            async with line.slots:
                await self._admitted(line)
                begin()
                return await self.play(task, own, name, sampling)

        return Manager(play, self.training if manner is None else manner, self.counts, self.lost)

    async def meet(self, tasks: Sequence[Task]) -> None:
        """Before the first environment of a name is made: find out where such ones may run."""
        for task in {task.env: task for task in tasks}.values():
            called = short_name(task.env) if task.env else None
            await self.workers.meet(partial(self.cast.env, task), called, self.limits.step_seconds)

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Around waiting for episodes."""
        with fewer_collections, Watchdog():
            yield

    def whole(self, tasks: Sequence[Task]) -> bool:
        """Whether a batch of these comes as a whole from `train`: it is given, or on tape."""
        return self.tape is not None or any(isinstance(task, GivenTask) for task in tasks)

    async def train(
        self, tasks: Sequence[Task], seed: int, group_size: int, count: int, sampling: Mapping[str, Any] | None = None
    ) -> list[Group]:
        """The groups to train on: given, or made in the training's manner, and recorded or replayed where so asked."""
        if any(isinstance(task, GivenTask) for task in tasks):
            return self.shown(tasks)

        async def play() -> list[Group]:
            # A baseline is measured, not selected; and what is on tape is scored when it is trained on.
            manner = replace(self.training, judge=None, score=self.training.score if self.training.keep else None)
            manner = manner if sampling is None else PLAIN
            return await self.collect(tasks, seed, group_size, sampling, manner, count)

        return await play() if self.tape is None else await self.tape.batch(seed, tasks, play)

    def shown(self, tasks: Sequence[Task]) -> list[Group]:
        """The groups of given tasks: nothing is played."""
        given = [task for task in tasks if isinstance(task, GivenTask)]
        return self.given.groups(given) if self.given is not None else []

    def _in_line(self) -> Line:
        """What episodes wait in, of this event loop."""
        if self._line is None or self._line.loop is not asyncio.get_running_loop():
            most = FIRST if self.workers.kind == "process" else math.inf  # a machine holds only so many of these
            slots = Slots(self.concurrency, self._crowded, self._first(), most)
            self._line = Line(asyncio.get_running_loop(), slots, asyncio.Lock())
            self.asked.after = slots.look
        return self._line

    def _first(self) -> int:
        """Episodes to begin with: as many as the engine can serve. The usual number where it does not say, or where
        each environment takes a thread or a process."""
        return FIRST if self.workers.costly else max(FIRST, int(getattr(self.engine, "capacity", 0)))

    def _crowded(self) -> bool:
        """Whether the engine says so; one that does not say has room."""
        return bool(getattr(self.engine, "crowded", False))

    async def _admitted(self, line: Line) -> None:
        """Hold new episodes back while the engine has requests it has no room for; one asks for all that wait."""
        if not self._crowded():
            return
        async with line.door:
            while self._crowded():
                await asyncio.sleep(CROWDED)

    async def play(self, task: Task, seed: int, name: str, sampling: Mapping[str, Any] | None = None) -> Episode:
        """One episode, whatever happens in it."""
        episode = Episode(name, task, seed)
        began = time.perf_counter()
        usual = self.cast.sampling(task, self.sampling) if self.cast.sampling else self.sampling
        limits = self.cast.limits(task, self.limits) if self.cast.limits else self.limits
        with span("arborl.episode", inside_arborl__episode=name, arborl__source=task.source or None) as told:
            try:
                async with boundary("episode", limits.episode_seconds):
                    await self._act(episode, replace(usual, **sampling) if sampling else usual, limits)
            except EpisodeError as error:
                episode.fail(error)
                self.firsts.tell(episode)
                told.fail(f"{error.where}: {error.kind}")
            told.note(
                arborl__stop=episode.stop.value, arborl__turns=len(episode.turns), arborl__sampled=episode.sampled
            )
            told.end_when_scored(episode)
        episode.seconds = time.perf_counter() - began
        return episode

    async def _act(self, episode: Episode, sampling: Sampling, limits: Limits) -> None:
        task = episode.task
        called = short_name(task.env) if task.env else None
        async with boundary(f"environment {called!r}" if called else "environment of the run"):
            inner, name = await self.workers.place(partial(self.cast.env, task), called, limits.step_seconds)
        env = RecordedEnv(inner, name, limits, episode)
        drawn = sampling.drawn if sampling.drawn != self.sampling.drawn else None
        model = Recorder(self.engine, self.renderer, sampling, limits, episode, drawn, self.asked, self.rivals)
        async with boundary(f"agent {task.agent or 'of the run'}"):
            agent = self.cast.agent(task)
            try:
                with closing(model):
                    await agent.run(task, env, model)
            except EpisodeLimitReached as over:
                episode.stop = StopReason(over.stop)
            except BaseException:
                with suppress(EpisodeError):  # what failed first is what is told
                    await env.close()
                raise
            await env.close()
        await env.finish()

    def metrics(self) -> Metrics:
        """Since the last call: episodes cancelled, groups expired or filtered, environments left behind or replaced,
        and what code waited for a sandbox."""
        counts, self.counts = self.counts, Counter()
        hang = left_behind.stuck() - self.hung
        stuck = {"rollout/tool_calls_stuck": float(sum(n for whose, n in hang.items() if not of_reward(whose)))}
        limit = self._line.slots.limit if self._line is not None else self.concurrency or self._first()
        stuck["rollout/concurrency"] = float(int(limit))
        return named(counts) | self.workers.metrics() | sandbox.metrics() | stuck

    def failed_unseen(self) -> list[Episode]:
        """Since the last call: failed episodes of groups that a filter dropped, which nobody else hears of."""
        lost, self.lost = self.lost, []
        return lost

    def close(self) -> None:
        """End the processes of environments."""
        self.workers.close()


class FewerCollections:
    """Let Python look for garbage less often: episodes are many small objects that all stay until they are trained on,
    and looking through them again and again takes a sixth of a rollout's time."""

    def __init__(self) -> None:
        self.depth, self.before = 0, gc.get_threshold()

    def __enter__(self) -> None:
        if self.depth == 0:
            self.before = gc.get_threshold()
            gc.set_threshold(max(self.before[0], COLLECT) if self.before[0] else 0, *self.before[1:])
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            gc.set_threshold(*self.before)


fewer_collections = FewerCollections()
