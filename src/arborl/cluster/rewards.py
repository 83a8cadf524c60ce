"""Rewards on a Ray cluster, behind `Reward`: a process that hangs or dies is replaced, and the episode scored again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arborl.cluster.connection import Actor, Cluster
from arborl.cluster.host import Host, check_versions
from arborl.engines.replicas import Replica, Replicas, Unreachable, now
from arborl.errors import ConfigError, EpisodeError, boundary
from arborl.rewards import Rewards
from arborl.rewards.answers import environment
from arborl.rewards.reward import GroupReward, Reward, RewardsBySource
from arborl.rewards.threaded_calls import call
from arborl.tools.threads import MOST, left_behind
from arborl.types import Episode, Metrics

PRESENT = 5.0
"""Seconds in which a process must answer whose reward was given up; else it hangs."""


class RewardHost(Host):
    """The other side: scores episodes."""

    def __init__(self, paths: Sequence[str], allow_unsafe: bool, packed: bytes):
        super().__init__(paths, allow_unsafe)
        from ray import cloudpickle

        self.rewards: list[tuple[str, Reward, float]] = cloudpickle.loads(packed)
        """Each with its name and its deadline in seconds."""

    async def score(self, index: int, episode: Episode) -> tuple[Any, BaseException | None, Metrics]:
        """What the reward says, or raised; and the episode's metrics, which it may have added to."""
        name, reward, seconds = self.rewards[index]
        try:
            async with boundary(f"reward {name!r}", seconds):
                return await call(reward, episode), None, episode.metrics
        except EpisodeError as error:  # whoever asked attributes it again, to the same reward
            cause = error.cause
            return None, _sendable(cause if isinstance(cause, Exception) else error), episode.metrics

    async def left_behind(self) -> int:
        """Calls of plain rewards that hang in threads of this process."""
        return left_behind.running().total()


def _sendable(error: Exception) -> Exception:
    """As it is where that can be sent, else its words."""
    from ray import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


@dataclass(eq=False, slots=True)
class RewardReplica(Replica):
    """One process."""

    actor: Actor | None = None


class RewardWorkers:
    """The processes that rewards are computed in.

    Args:
        cluster: where they are.
        rewards: what each of them can compute: name, reward, and what it may take for one episode, in seconds.
    """

    def __init__(self, cluster: Cluster, rewards: Sequence[tuple[str, Reward, float]]):
        from ray import cloudpickle

        for name, reward, _ in rewards:
            try:
                cloudpickle.dumps(reward)
            except Exception as error:
                raise ConfigError(
                    f"placement.reward_workers={cluster.placement.reward_workers}: the reward {name!r} cannot be sent "
                    f"to a process ({type(error).__name__}: {error}). Let it open what it needs when it is called, or "
                    "write placement.reward_workers=0."
                ) from error
        self.cluster = cluster
        self.packed = cluster.ray.put(cloudpickle.dumps(list(rewards)))
        count, seconds = cluster.placement.reward_workers, cluster.placement.seconds
        self.replicas = [RewardReplica(f"reward worker {number}") for number in range(count)]
        self.routes = Replicas(self.replicas, self._start, seconds, "reward worker")
        self.tasks: set[asyncio.Task[None]] = set()
        now(self._open())

    async def _open(self) -> None:
        """All must start: what is wrong with the nodes is found here."""
        await asyncio.gather(*map(self._start, self.replicas))
        for replica in self.replicas:
            replica.up = True

    async def score(self, index: int, episode: Episode) -> Any:
        """What reward number `index` says of an episode."""
        value, error, metrics = await self.routes.ask(episode.id, lambda replica: self._ask(replica, index, episode))
        episode.metrics.update(metrics)
        if error is not None:
            raise error
        return value

    async def _ask(self, replica: RewardReplica, index: int, episode: Episode) -> Any:
        assert replica.actor is not None
        asked = replica.actor.score.remote(index, episode)
        try:
            return await asyncio.wrap_future(asked.future())
        except asyncio.CancelledError:
            self.cluster.ray.cancel(asked, recursive=False)
            self._suspect(replica)
            raise
        except self.cluster.ray.exceptions.RayError as error:
            raise Unreachable(f"{replica.name} is gone: {type(error).__name__}") from error

    def _suspect(self, replica: RewardReplica) -> None:
        """Its reward took too long: see whether the process still answers."""
        task = asyncio.get_running_loop().create_task(self._check(replica, replica.actor))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _check(self, replica: RewardReplica, actor: Actor) -> None:
        """Replace a process whose event loop is held, or in which so many calls hang that it may begin no more."""
        try:
            hang = await asyncio.wait_for(asyncio.wrap_future(actor.left_behind.remote().future()), PRESENT)
        except (TimeoutError, self.cluster.ray.exceptions.RayError):
            hang = MOST
        if hang >= MOST and replica.actor is actor:
            self.cluster.stop(actor)
            self.routes.lose(replica, f"{replica.name} hangs in a reward")

    async def _start(self, replica: RewardReplica) -> None:
        another = replica.actor is not None
        if another:
            self.cluster.stop(replica.actor)
        replica.actor = self.cluster.start(RewardHost, self.packed, cpus=0 if another else 1)  # there may be none left
        try:
            asked = asyncio.wrap_future(replica.actor.told.remote().future())
            told = await asyncio.wait_for(asked, self.cluster.placement.seconds)
        except (TimeoutError, self.cluster.ray.exceptions.RayError) as error:
            said = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise Unreachable(f"{replica.name} does not start: {said[-1].strip()[:300]}") from error
        check_versions(self.cluster.versions, told.versions, replica.name)
        replica.version = self.routes.coming

    def metrics(self) -> Metrics:
        """Since the last call: processes lost, for how long; and how many answer now."""
        named = {"engine/lost": "lost", "engine/seconds_lost": "seconds_lost", "engine/servers": "workers"}
        return {f"rewards/{named[key]}": value for key, value in self.routes.metrics().items() if key in named}


class PlacedReward:
    """A reward that is computed elsewhere."""

    def __init__(self, workers: RewardWorkers, index: int, reward: Any):
        self.workers, self.index, self.reward = workers, index, reward

    async def __call__(self, episode: Episode) -> Any:
        return await self.workers.score(self.index, episode)


class PlacedGroupReward(PlacedReward):
    """One that also looks across a group, which is done here."""

    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> Sequence[float]:
        return self.reward.across(episodes, values)  # type: ignore[no-any-return]


def place_rewards(cluster: Cluster, rewards: Rewards) -> None:
    """Have all rewards but `env` computed on the cluster."""
    everything = [rewards, *(rewards.sources.values() if isinstance(rewards, RewardsBySource) else ())]
    chosen = [
        (name, one, some.seconds) for some in everything for name, one, _ in some.called if one is not environment
    ]
    if not chosen:
        count = cluster.placement.reward_workers
        raise ConfigError(f"placement.reward_workers={count}: this run has no reward but env, which is not computed.")
    workers, index = RewardWorkers(cluster, chosen), 0
    for some in everything:
        placed = []
        for name, one, weight in some.called:
            if one is not environment:  # which only adds up what the episode carries
                kind = PlacedGroupReward if isinstance(one, GroupReward) else PlacedReward
                one, index = kind(workers, index, one), index + 1
            placed.append((name, one, weight))
        some.called = placed
    rewards.remote = workers
