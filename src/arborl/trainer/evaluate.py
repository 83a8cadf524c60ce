"""How well a policy plays tasks it is never trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Protocol

from arborl.config.rollout_config import ValEnvsConfig
from arborl.config.run_config import EvaluationConfig
from arborl.data.mixing.mixture import Mixture
from arborl.data.source import TaskSource
from arborl.rewards.reward import Rewards
from arborl.rollout.runner import Rollout
from arborl.seeds import derive
from arborl.spans import end_open_spans, span
from arborl.trainer.failing import hopeless
from arborl.trainer.intervals import student, wilson
from arborl.types import Episode, Group, Metrics, Task

log = logging.getLogger(__name__)

MANY = 0.05
"""Share of failed episodes above which numbers that count them as 0 are doubtful."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's numbers, and the sampled episodes behind them."""

    metrics: Metrics
    groups: list[Group]

    @property
    def episodes(self) -> list[Episode]:
        """All of them, the failed ones too."""
        return [episode for group in self.groups for episode in group.episodes]


class Measures(Protocol):
    """What measures a policy on what it is never trained on."""

    async def measure(self) -> Measured: ...


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

        Of several sources each has its own as well: `success/math`. Where nearly all fail, once is enough.
        """
        groups = await self.play(self.config.temperature)
        metrics = headline(groups)
        warn_of_failures(groups)
        if self.config.greedy and not hopeless(*counted(groups)):
            greedy = headline(await self.play(0.0))
            metrics |= {f"greedy_{name}": value for name, value in greedy.items()}
        return Measured(metrics, groups)

    async def play(self, temperature: float) -> list[Group]:
        """The scored episodes."""
        asked = {name: getattr(self.config, name) for name in ("top_k", "top_p", "min_p", "max_tokens")}
        own = {"temperature": temperature} | {name: value for name, value in asked.items() if value is not None}
        seed, size = derive(self.seed, "evaluation"), self.tags.group_size
        with span("arborl.evaluation", arborl__temperature=temperature):
            groups = await self.rollout.collect(self.tasks(), seed, size, own)
            await self.rewards.score(groups)
        end_open_spans()
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


def counted(groups: list[Group]) -> tuple[int, int]:
    """Episodes, and how many of them failed."""
    played = sum(len(group.episodes) for group in groups)
    return played, played - sum(len(group.valid_episodes) for group in groups)


def warn_of_failures(groups: list[Group]) -> None:
    """Say so where many episodes failed: what is measured then is not the policy alone. Where nearly all did, others
    say more."""
    played, failed = counted(groups)
    if failed > MANY * played and not hopeless(played, failed):
        first = next(e.failure for group in groups for e in group.episodes if e.failure is not None)
        log.warning(
            "%d of %d held-out episodes failed and count as 0: the policy may be better than that. The first: %s",
            failed,
            played,
            first,
        )


def scores(groups: list[Group]) -> Metrics:
    """Success and reward with their 95 % intervals, the number of tasks, and that of failed episodes; rewards of weight
    0 beside them.

    A failed episode is no success: it counts as 0 of both. Where all failed, or nobody judged success, nothing was
    measured, and nothing is said.
    """
    _, failed = counted(groups)
    found = {"tasks": float(len(groups)), "failed": float(failed)}
    alive = [episode for group in groups for episode in group.valid_episodes]
    if not alive:
        return found
    if any("success" in episode.metrics for episode in alive):
        found |= _with_interval("success", groups, lambda episode: episode.metrics.get("success", 0.0))
    found |= _with_interval("reward", groups, lambda episode: episode.reward)
    beside = dict.fromkeys(name for episode in alive for name in episode.metrics if is_beside(name))
    for name in beside:
        found |= _with_interval(name, groups, partial(_metric, name))
    return found


def is_beside(name: str) -> bool:
    """Whether it is the number of a reward that is only shown (`reward/<name>`), and not a part of another's."""
    return name.startswith("reward/") and name.count("/") == 1


def _metric(name: str, episode: Episode) -> float:
    return episode.metrics.get(name, 0.0)


def _with_interval(name: str, groups: list[Group], value: Callable[[Episode], float]) -> Metrics:
    """The mean over tasks of their episodes' means, and between what it lies."""
    own = [
        fmean(value(episode) if episode.failure is None else 0.0 for episode in group.episodes)
        for group in groups
        if group.episodes
    ]
    mean = fmean(own)
    ends = wilson(mean, len(own)) if name == "success" and 0 <= mean <= 1 else student(own)
    return {name: mean} | ({f"{name}_low": ends[0], f"{name}_high": ends[1]} if ends else {})
