"""Other rewards for the tasks of some sources."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from arborl.rewards.reward import Rewards
from arborl.types import Episode, Group


class RewardsBySource(Rewards):
    """Has each group scored by the rewards of its task's source; by the run's where it has none of its own."""

    def __init__(self, run: Rewards, sources: Mapping[str, Rewards]):
        super().__init__(run.rewards, run.seconds)
        self.sources = dict(sources)
        for own in self.sources.values():
            own.busy_time = self.busy_time

    async def judge(self, episode: Episode) -> None:
        own = self.sources.get(episode.task.source)
        await (own.judge(episode) if own is not None else super().judge(episode))

    async def score(self, groups: Sequence[Group]) -> None:
        others = [group for group in groups if group.task.source not in self.sources]
        own = {name: [group for group in groups if group.task.source == name] for name in self.sources}
        await asyncio.gather(
            super().score(others), *(self.sources[name].score(mine) for name, mine in own.items() if mine)
        )
