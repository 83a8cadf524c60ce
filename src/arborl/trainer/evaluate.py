"""How well a policy plays tasks it is never trained on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from arborl.config.rollout import ValEnvsConfig
from arborl.config.run import EvaluationConfig
from arborl.data.mixture import Mixture
from arborl.data.source import TaskSource
from arborl.rewards.reward import Rewards
from arborl.rollout.runner import Rollout
from arborl.seeds import derive
from arborl.trainer.summary import summarize
from arborl.types import Group, Metrics, Task


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's numbers, and the sampled episodes behind them."""

    metrics: Metrics
    groups: list[Group]


class Evaluator:
    """Plays every held-out task once, sampled; and once more taking the likeliest tokens, if asked.

    Args:
        source: of held-out tasks.
        rollout, rewards: play and judge.
        config: how many, and how.
        seed: the run's.
        tags: which environments, and how many tasks of each, where the run has several.
    """

    def __init__(
        self,
        source: TaskSource,
        rollout: Rollout,
        rewards: Rewards,
        config: EvaluationConfig,
        seed: int,
        tags: ValEnvsConfig | None = None,
    ):
        self.source, self.rollout, self.rewards = source, rollout, rewards
        self.config, self.seed, self.tags = config, seed, tags or ValEnvsConfig()

    async def measure(self) -> Measured:
        """`success` and `reward` as sampled, `greedy_success` and `greedy_reward` beside them; all means over tasks.

        Of several sources each has its own as well: `success/math`.
        """
        groups = await self.play(self.config.temperature)
        metrics = headline(groups)
        if self.config.greedy:
            greedy = headline(await self.play(0.0))
            metrics |= {f"greedy_{name}": value for name, value in greedy.items()}
        return Measured(metrics, groups)

    async def play(self, temperature: float) -> list[Group]:
        """The scored episodes."""
        sampling = dataclasses.replace(self.rollout.sampling, temperature=temperature)
        seed, size = derive(self.seed, "evaluation"), self.tags.group_size
        groups = await self.rollout.collect(self.tasks(), seed, size, sampling)
        await self.rewards.score(groups)
        return groups

    def tasks(self) -> list[Task]:
        """The held-out tasks; by tag, where it is said which."""
        if not self.tags.tags or not isinstance(self.source, Mixture):
            return self.source.evaluation(self.config.tasks)
        counts = self.tags.counts or dict.fromkeys(self.tags.tags, -(-self.config.tasks // len(self.tags.tags)))
        return [task for tag, count in counts.items() for task in self.source.pools[tag].evaluation(count)]


def headline(groups: list[Group]) -> Metrics:
    """Success and reward, of all tasks and by source where there are several."""
    sources = list(dict.fromkeys(group.task.source for group in groups))
    metrics = scores(groups)
    for source in sources if len(sources) > 1 else ():
        own = scores([group for group in groups if group.task.source == source])
        metrics |= {f"{name}/{source}": value for name, value in own.items()}
    return metrics


def scores(groups: list[Group]) -> Metrics:
    """Success and reward. A failed episode is no success: it counts as 0 of both, and is named where there is one."""
    metrics = summarize(groups)
    failed = metrics["episode/failed"]
    share = 1.0 - failed / max(metrics["episode/count"], 1.0)
    found = {
        "success": metrics.get("episode/success", 0.0) * share,
        "reward": metrics.get("reward/mean", 0.0) * share,
    }
    return found | ({"failed": failed} if failed else {})
