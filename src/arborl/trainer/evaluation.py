"""Evaluation of a policy on held-out tasks: success and reward with 95 % intervals.

Tasks are the samples: several episodes of one task are averaged first. An interval is about other tasks of the same
kind, not about another training run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, fmean, stdev
from typing import Protocol

from arborl.config.run_config import EvaluationConfig
from arborl.data.mixing.mixture import Mixture
from arborl.data.task_source import TaskSource
from arborl.diagnosis.run_monitor import nearly_all_failed
from arborl.rewards.reward import Rewards
from arborl.rollout.runner import Rollout
from arborl.seeds import derive
from arborl.spans import end_open_spans, span
from arborl.types import Episode, Group, Metrics, Task

log = logging.getLogger(__name__)

MAX_FAILED_SHARE = 0.05
"""Share of failed episodes, which count as 0, above which a warning is logged."""
Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    metrics: Metrics
    groups: list[Group]

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]


class HeldOutEvaluator(Protocol):
    async def measure(self) -> EvaluationResult: ...


class Evaluator:
    """Runs every held-out task once with sampling, and once greedily if configured."""

    def __init__(
        self,
        source: TaskSource,
        rollout: Rollout,
        rewards: Rewards,
        config: EvaluationConfig,
        seed: int,
        counts: Mapping[str, int] | None = None,
    ):
        self.source, self.rollout, self.rewards = source, rollout, rewards
        self.config, self.seed, self.counts = config, seed, counts

    async def measure(self) -> EvaluationResult:
        """`success` and `reward` with sampling, `greedy_success` and `greedy_reward`; means over tasks. With several
        sources each has its own too: `success/math`."""
        groups = await self.play(self.config.temperature)
        metrics = evaluation_metrics(groups)
        warn_of_failures(groups)
        if self.config.greedy and not nearly_all_failed(*count_episodes(groups)):
            greedy = evaluation_metrics(await self.play(0.0))
            metrics |= {f"greedy_{name}": value for name, value in greedy.items()}
        return EvaluationResult(metrics, groups)

    async def play(self, temperature: float) -> list[Group]:
        """The scored episodes of all held-out tasks."""
        sampling = self.config.sampling | {"temperature": temperature}
        with span("arborl.evaluation", arborl__temperature=temperature):
            seed = derive(self.seed, "evaluation")
            groups = await self.rollout.collect(self.tasks(), seed, self.config.group_size, sampling)
            await self.rewards.score(groups)
        end_open_spans()
        return groups

    def tasks(self) -> list[Task]:
        if not self.counts or not isinstance(self.source, Mixture):
            return self.source.evaluation(self.config.tasks)
        return [task for name, count in self.counts.items() for task in self.source.pools[name].evaluation(count)]


def evaluation_metrics(groups: list[Group]) -> Metrics:
    return metrics_by_source(groups, scores)


def metrics_by_source(groups: list[Group], measure: Callable[[list[Group]], Metrics]) -> Metrics:
    """`measure` of all groups, and of each source if there are several: `success`, `success/math`."""
    sources = list(dict.fromkeys(group.task.source for group in groups))
    metrics = measure(groups)
    for source in sources if len(sources) > 1 else ():
        part = measure([group for group in groups if group.task.source == source])
        metrics |= {f"{name}/{source}": value for name, value in part.items()}
    return metrics


def count_episodes(groups: Sequence[Group]) -> tuple[int, int]:
    num_episodes = sum(len(group.episodes) for group in groups)
    return num_episodes, num_episodes - sum(len(group.valid_episodes) for group in groups)


def warn_of_failures(groups: list[Group]) -> None:
    """Log a warning if many episodes failed. If nearly all did, the caller raises."""
    num_episodes, num_failed = count_episodes(groups)
    if num_failed > MAX_FAILED_SHARE * num_episodes and not nearly_all_failed(num_episodes, num_failed):
        first = next(e.failure for group in groups for e in group.episodes if e.failure is not None)
        log.warning(
            "%d of %d held-out episodes failed and count as 0: the policy may be better than measured. The first: %s",
            num_failed,
            num_episodes,
            first,
        )


def scores(groups: list[Group]) -> Metrics:
    """Success, reward and rewards of weight 0 with 95 % intervals; number of tasks and of failed episodes. A failed
    episode counts as 0. If all failed, or no part reports success, that metric is absent: not measured."""
    metrics = {"tasks": float(len(groups)), "failed": float(count_episodes(groups)[1])}
    survivors = [episode for group in groups for episode in group.valid_episodes]
    if not survivors:
        return metrics
    for name, value in episode_scores(survivors).items():
        metrics |= _mean_and_interval(name, groups, value)
    return metrics


def episode_scores(episodes: Sequence[Episode]) -> dict[str, Callable[[Episode], float]]:
    """Success if a part reports it, the reward, and `reward/<name>` of rewards with weight 0, without their parts."""
    names = dict.fromkeys(name for episode in episodes for name in episode.metrics)
    scores: dict[str, Callable[[Episode], float]] = {}
    if "success" in names:
        scores["success"] = partial(episode_metric, "success")
    scores["reward"] = lambda episode: episode.reward
    unweighted = [name for name in names if name.startswith("reward/") and name.count("/") == 1]
    return scores | {name: partial(episode_metric, name) for name in unweighted}


def episode_metric(name: str, episode: Episode) -> float:
    return episode.metrics.get(name, 0.0)


def group_mean(value: Callable[[Episode], float], group: Group) -> float:
    """Mean over a task's episodes; a failed one counts as 0."""
    return fmean(value(episode) if episode.failure is None else 0.0 for episode in group.episodes)


def counts_for(name: str, group: Group) -> bool:
    """Whether a task counts for this score: for success and pass@k not if its episodes are finished without a success
    value (a source whose rewards are degrees)."""
    if name != "success" and not name.startswith("pass"):
        return True
    return not group.valid_episodes or any("success" in episode.metrics for episode in group.valid_episodes)


def _mean_and_interval(name: str, groups: list[Group], value: Callable[[Episode], float]) -> Metrics:
    means = [group_mean(value, group) for group in groups if group.episodes and counts_for(name, group)]
    mean = fmean(means)
    interval = wilson(mean, len(means)) if name == "success" and 0 <= mean <= 1 else student(means)
    return {name: mean} | ({f"{name}_low": interval[0], f"{name}_high": interval[1]} if interval else {})


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a share: within 0 and 1, and informative at 0 of n.

    >>> [round(end, 3) for end in wilson(0.0, 20)]
    [0.0, 0.161]
    >>> [round(end, 3) for end in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    if n < 1:
        raise ValueError("an interval needs at least one task")
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    reach = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's t interval of a mean; None for a single value.

    >>> [round(end, 3) for end in student([1.0, 2.0, 3.0, 4.0, 5.0])]
    [1.037, 4.963]
    """
    if len(values) < 2:
        return None
    middle, reach = fmean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return middle - reach, middle + reach


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of the t distribution: exact for 1 and 2 degrees of freedom, above a series (error 1e-2 at 3).

    >>> [round(t_quantile(n), 2) for n in (1, 2, 4, 9, 199)]
    [12.71, 4.3, 2.78, 2.26, 1.97]
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = Z, freedom
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return sum(terms)
