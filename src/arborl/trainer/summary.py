"""A step's groups as numbers. Means are over episodes that did not fail, one vote each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from arborl.algorithms.episode_advantages import is_flat
from arborl.types import NOT_SAMPLED, Episode, FinishReason, Forest, Group, Metrics, StopReason, Terms

STOPS = (StopReason.DONE, StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL)
"""How an episode that did not fail can end."""
SKIPPED: Metrics = {"learner/skipped": 0.0, "learner/skipped/no_terms": 0.0, "learner/skipped/gradient": 0.0}
"""Counters that are written at 0 too: a column that comes and goes is no curve."""


def summarize(groups: Sequence[Group]) -> Metrics:
    """What happened in these episodes."""
    everyone = [episode for group in groups for episode in group.episodes if episode.weight > 0]
    alive = [episode for episode in everyone if episode.failure is None]
    given = any(episode.is_offline for episode in everyone)  # then nobody earned anything
    metrics: Metrics = {
        "episode/count": float(len(everyone)),
        "episode/failed": float(len(everyone) - len(alive)),
    }
    if not given:
        metrics["group/zero_variance"] = (
            float(np.mean([is_flat(_rewards(group)) for group in groups])) if groups else 0.0
        )
    for where, count in Counter(episode.failure.where for episode in everyone if episode.failure).items():
        metrics[f"failed/{where}"] = float(count)
    if not alive:
        return metrics
    metrics |= {
        "episode/turns": float(np.mean([len(episode.turns) for episode in alive])),
        "episode/sampled": float(np.mean([episode.sampled for episode in alive])),
        "episode/calls": float(np.mean([len(episode.calls) for episode in alive])),
    }
    finishes = [call.completion.finish for episode in alive for call in episode.calls]
    metrics["call/cut_off"] = finishes.count(FinishReason.LENGTH) / max(len(finishes), 1)
    stops = Counter(episode.stop for episode in alive)
    metrics |= {f"stop/{stop}": stops[stop] / len(alive) for stop in dict.fromkeys((*STOPS, *stops))}
    if not given:
        rewards = np.array([episode.reward for episode in alive])
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        metrics |= {f"reward/{name}": value for name, value in _means(alive, "rewards").items()}
    numbers = _means(alive, "metrics").items()
    return metrics | {name if name.startswith("reward/") else f"episode/{name}": value for name, value in numbers}


def _means(episodes: Sequence[Episode], field: str) -> Metrics:
    """Mean of each named number; an episode that does not name it counts as 0 (a tool that was not called)."""
    rows: list[dict[str, float]] = [getattr(episode, field) for episode in episodes]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row.get(name, 0.0) for row in rows])) for name in names}


def _rewards(group: Group) -> np.ndarray:
    return np.array([episode.reward for episode in group.valid_episodes])


def describe_batch(forest: Forest, terms: Terms, version: int) -> Metrics:
    """The learner's batch: its size, what sharing saved, the spread of advantages, and how many versions older than the
    learner's its tokens are."""
    unique = sum(len(tree) for tree in forest.trees)
    lag = version - terms.version[terms.version != NOT_SAMPLED]
    return {
        "batch/lag_mean": float(lag.mean()) if len(lag) else 0.0,
        "batch/lag_max": float(lag.max(initial=0)),
        "learner/groups": float(len(forest.trees)),
        "learner/terms": float(len(terms)),
        "learner/tokens": float(unique),
        "learner/unique_share": unique / forest.raw_tokens if forest.raw_tokens else 1.0,
        "learner/advantage_abs": float(np.abs(terms.advantage).mean()) if len(terms) else 0.0,
    }
