"""Episodes are played concurrently, each under its own deadline; one that breaks costs itself and is named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arborl.agents.agent import Agent
from arborl.chat.renderer import Renderer
from arborl.engines.engine import Engine
from arborl.envs.env import Env
from arborl.errors import EpisodeError, EpisodeOver, boundary
from arborl.rollout.recorder import Limits, RecordedEnv, Recorder
from arborl.seeds import derive
from arborl.types import Episode, Group, Sampling, Stop, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays: makers of a fresh agent and a fresh environment for a task."""

    agent: Callable[[Task], Agent]
    env: Callable[[Task], Env]


class Rollout:
    """Plays tasks.

    Example:
        groups = await rollout.collect(tasks, seed=derive(run_seed, "step", 3), group_size=8)
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, cast: Cast, sampling: Sampling, limits: Limits, concurrency: int
    ):
        self.engine, self.renderer, self.cast = engine, renderer, cast
        self.sampling, self.limits = sampling, limits
        self.slots = asyncio.Semaphore(concurrency)

    async def collect(
        self, tasks: Sequence[Task], seed: int, group_size: int, sampling: Sampling | None = None
    ) -> list[Group]:
        """Play every task `group_size` times. Episodes depend on `seed`, their task and their number; nothing else."""
        async with asyncio.TaskGroup() as running:
            jobs = [
                [
                    running.create_task(
                        self._turn_in_line(task, derive(seed, "task", t, "episode", e), f"{task.id}#{e}", sampling)
                    )
                    for e in range(group_size)
                ]
                for t, task in enumerate(tasks)
            ]
        return [Group(task, [job.result() for job in row]) for task, row in zip(tasks, jobs, strict=True)]

    async def _turn_in_line(self, task: Task, seed: int, name: str, sampling: Sampling | None) -> Episode:
        async with self.slots:
            return await self.play(task, seed, name, sampling)

    async def play(self, task: Task, seed: int, name: str, sampling: Sampling | None = None) -> Episode:
        """One episode, whatever happens in it."""
        episode = Episode(name, task, seed)
        began = time.perf_counter()
        try:
            async with boundary("episode", self.limits.episode_seconds):
                await self._act(episode, sampling or self.sampling)
        except EpisodeError as error:
            log.warning("episode %s failed and is left out: %s", episode.id, episode.fail(error))
        episode.seconds = time.perf_counter() - began
        return episode

    async def _act(self, episode: Episode, sampling: Sampling) -> None:
        task = episode.task
        async with boundary(f"environment {task.env or 'of the run'}"):
            inner = self.cast.env(task)
        env = RecordedEnv(inner, task.env or type(inner).__name__, self.limits, episode)
        model = Recorder(self.engine, self.renderer, sampling, self.limits, episode)
        async with boundary(f"agent {task.agent or 'of the run'}"):
            agent = self.cast.agent(task)
            try:
                await agent.run(task, env, model)
            except EpisodeOver as over:
                episode.stop = Stop(over.stop)
            finally:
                await env.close()
        await env.finish()
