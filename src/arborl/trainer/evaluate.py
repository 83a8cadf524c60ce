"""How well a policy plays tasks it is never trained on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from arborl.config.run import EvaluationConfig
from arborl.data.source import TaskSource
from arborl.rewards.reward import Rewards
from arborl.rollout.runner import Rollout
from arborl.seeds import derive
from arborl.trainer.summary import summarize
from arborl.types import Group, Metrics


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's numbers, and the sampled episodes behind them."""

    metrics: Metrics
    groups: list[Group]


class Evaluator:
    """Plays every held-out task once, sampled; and once more taking the likeliest tokens, if asked."""

    def __init__(self, source: TaskSource, rollout: Rollout, rewards: Rewards, config: EvaluationConfig, seed: int):
        self.source, self.rollout, self.rewards = source, rollout, rewards
        self.config, self.seed = config, seed

    async def measure(self) -> Measured:
        """`success` and `reward` as sampled, `greedy_success` and `greedy_reward` beside them; all means over tasks."""
        groups = await self.play(self.config.temperature)
        metrics = headline(groups)
        if self.config.greedy:
            greedy = headline(await self.play(0.0))
            metrics |= {f"greedy_{name}": value for name, value in greedy.items()}
        return Measured(metrics, groups)

    async def play(self, temperature: float) -> list[Group]:
        """The scored episodes."""
        sampling = dataclasses.replace(self.rollout.sampling, temperature=temperature)
        tasks = self.source.evaluation(self.config.tasks)
        groups = await self.rollout.collect(tasks, derive(self.seed, "evaluation"), group_size=1, sampling=sampling)
        await self.rewards.score(groups)
        return groups


def headline(groups: list[Group]) -> Metrics:
    """Success and reward. A failed episode is no success: it counts as 0 of both."""
    metrics = summarize(groups)
    share = 1.0 - metrics["episode/failed"] / max(metrics["episode/count"], 1.0)
    return {
        "success": metrics.get("episode/success", 0.0) * share,
        "reward": metrics.get("reward/mean", 0.0) * share,
    }
