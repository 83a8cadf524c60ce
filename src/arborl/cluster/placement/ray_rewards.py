"""Rewards on a Ray cluster, behind `Reward`. Processes that hang or die are replaced; episodes are scored again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arborl.cluster.placement.actors import ClusterActor, check_versions
from arborl.cluster.placement.batched_calls import sendable
from arborl.cluster.placement.ray_cluster import Actor, RayCluster
from arborl.engines.remote.replicas import Replica, ReplicaPool, ReplicaUnavailable, run_blocking
from arborl.errors import ConfigError, EpisodeError, boundary
from arborl.rewards import Rewards
from arborl.rewards.answers import environment
from arborl.rewards.reward import GroupReward, Reward, RewardsBySource
from arborl.rewards.threaded_calls import call
from arborl.tools.core.background_threads import MAX_HANGING_CALLS, abandoned_calls
from arborl.types import Episode, Metrics

CHECK_SECONDS = 5.0
"""Timeout of a check after a reward was cancelled; a process that does not answer is replaced."""


class RewardActor(ClusterActor):
    def __init__(self, paths: Sequence[str], allow_unsafe: bool, packed: bytes):
        super().__init__(paths, allow_unsafe)
        from ray import cloudpickle

        self.rewards: list[tuple[str, Reward, float]] = cloudpickle.loads(packed)
        """Name, reward, timeout in seconds."""

    async def score(self, index: int, episode: Episode) -> tuple[Any, BaseException | None, Metrics]:
        """Value, exception, and the episode's metrics, which the reward may change."""
        name, reward, seconds = self.rewards[index]
        try:
            async with boundary(f"reward {name!r}", seconds):
                return await call(reward, episode), None, episode.metrics
        except EpisodeError as error:  # the caller attributes it to the same reward again
            cause = error.cause
            return None, sendable(cause if isinstance(cause, Exception) else error), episode.metrics

    async def left_behind(self) -> int:
        """Calls that still run in threads after their timeout."""
        return abandoned_calls.running().total()


@dataclass(eq=False, slots=True)
class RewardReplica(Replica):
    actor: Actor | None = None


class RewardWorkers:
    def __init__(self, cluster: RayCluster, rewards: Sequence[tuple[str, Reward, float]]):
        from ray import cloudpickle

        for name, reward, _ in rewards:
            try:
                cloudpickle.dumps(reward)
            except Exception as error:
                raise ConfigError(
                    f"placement.reward_workers={cluster.placement.reward_workers}: the reward {name!r} cannot be "
                    f"pickled ({type(error).__name__}: {error}). Open resources when it is called, or "
                    "write placement.reward_workers=0."
                ) from error
        self.cluster = cluster
        self.packed = cluster.ray.put(cloudpickle.dumps(list(rewards)))
        count, seconds = cluster.placement.reward_workers, cluster.placement.seconds
        self.replicas = [RewardReplica(f"reward worker {number}") for number in range(count)]
        self.routes = ReplicaPool(self.replicas, self._start, seconds, "reward worker")
        self.tasks: set[asyncio.Task[None]] = set()
        run_blocking(self._open())

    async def _open(self) -> None:
        """Start all actors; errors of the nodes appear here."""
        await asyncio.gather(*map(self._start, self.replicas))
        for replica in self.replicas:
            replica.up = True

    async def score(self, index: int, episode: Episode) -> Any:
        """Value of reward number `index`."""
        value, error, metrics = await self.routes.ask(episode.id, lambda replica: self._ask(replica, index, episode))
        episode.metrics.update(metrics)
        if error is not None:
            raise error
        return value

    async def _ask(self, replica: RewardReplica, index: int, episode: Episode) -> Any:
        assert replica.actor is not None
        call = replica.actor.score.remote(index, episode)
        try:
            return await asyncio.wrap_future(call.future())
        except asyncio.CancelledError:
            self.cluster.ray.cancel(call, recursive=False)
            self._check_later(replica)
            raise
        except self.cluster.ray.exceptions.RayError as error:
            raise ReplicaUnavailable(f"{replica.name} is gone: {type(error).__name__}") from error

    def _check_later(self, replica: RewardReplica) -> None:
        """After a timeout, check that the process still answers."""
        task = asyncio.get_running_loop().create_task(self._check(replica, replica.actor))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _check(self, replica: RewardReplica, actor: Actor) -> None:
        """Replace a process whose event loop is blocked, or whose threads are all in use by hanging calls."""
        try:
            hang = await asyncio.wait_for(asyncio.wrap_future(actor.left_behind.remote().future()), CHECK_SECONDS)
        except (TimeoutError, self.cluster.ray.exceptions.RayError):
            hang = MAX_HANGING_CALLS
        if hang >= MAX_HANGING_CALLS and replica.actor is actor:
            self.cluster.stop(actor)
            self.routes.lose(replica, f"{replica.name} hangs in a reward")

    async def _start(self, replica: RewardReplica) -> None:
        another = replica.actor is not None
        if another:
            self.cluster.stop(replica.actor)
        replica.actor = self.cluster.start(RewardActor, self.packed, cpus=0 if another else 1)  # no core may be left
        try:
            call = asyncio.wrap_future(replica.actor.info.remote().future())
            info = await asyncio.wait_for(call, self.cluster.placement.seconds)
        except (TimeoutError, self.cluster.ray.exceptions.RayError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise ReplicaUnavailable(f"{replica.name} does not start: {lines[-1].strip()[:300]}") from error
        check_versions(self.cluster.versions, info.versions, replica.name)
        replica.version = self.routes.target_version

    def metrics(self) -> Metrics:
        """Since the last call: lost processes and their downtime; number of working processes."""
        named = {"engine/lost": "lost", "engine/seconds_lost": "seconds_lost", "engine/servers": "workers"}
        return {f"rewards/{named[key]}": value for key, value in self.routes.metrics().items() if key in named}


class PlacedReward:
    def __init__(self, workers: RewardWorkers, index: int, reward: Any):
        self.workers, self.index, self.reward = workers, index, reward

    async def __call__(self, episode: Episode) -> Any:
        return await self.workers.score(self.index, episode)


class PlacedGroupReward(PlacedReward):
    """A group reward; `across` runs in the driver."""

    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> Sequence[float]:
        return self.reward.across(episodes, values)  # type: ignore[no-any-return]


def place_rewards(cluster: RayCluster, rewards: Rewards) -> None:
    """Compute all rewards except `env` on the cluster."""
    everything = [rewards, *(rewards.sources.values() if isinstance(rewards, RewardsBySource) else ())]
    chosen = [
        (name, one, some.seconds) for some in everything for name, one, _ in some.called if one is not environment
    ]
    if not chosen:
        count = cluster.placement.reward_workers
        raise ConfigError(f"placement.reward_workers={count}: this run has only the reward env, which needs no worker.")
    workers, index = RewardWorkers(cluster, chosen), 0
    for some in everything:
        placed = []
        for name, one, weight in some.called:
            if one is not environment:  # it only adds up the episode's own rewards
                kind = PlacedGroupReward if isinstance(one, GroupReward) else PlacedReward
                one, index = kind(workers, index, one), index + 1
            placed.append((name, one, weight))
        some.called = placed
    rewards.remote = workers
