"""Metrics of a step. Means are over episodes that did not fail, with equal weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from arborl.algorithms.episode_advantages import is_constant
from arborl.types import NOT_SAMPLED, Episode, FinishReason, Forest, Group, Metrics, StopReason, Terms

STOPS = (StopReason.DONE, StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL)
SKIPPED_COUNTERS: Metrics = {"learner/skipped": 0.0, "learner/skipped/no_terms": 0.0, "learner/skipped/gradient": 0.0}
"""Written at 0 too, so that each is a continuous curve."""


def episode_metrics(groups: Sequence[Group]) -> Metrics:
    episodes = [episode for group in groups for episode in group.episodes if episode.weight > 0]
    survivors = [episode for episode in episodes if episode.failure is None]
    has_rewards = not any(episode.is_offline for episode in episodes)  # demonstrations have none
    metrics: Metrics = {"episode/count": float(len(episodes)), "episode/failed": float(len(episodes) - len(survivors))}
    if has_rewards:
        flat = [is_constant(np.array([episode.reward for episode in group.valid_episodes])) for group in groups]
        metrics["group/zero_variance"] = float(np.mean(flat)) if flat else 0.0
    for where, count in Counter(episode.failure.where for episode in episodes if episode.failure).items():
        metrics[f"failed/{where}"] = float(count)
    if not survivors:
        return metrics
    metrics |= {
        "episode/turns": float(np.mean([len(episode.turns) for episode in survivors])),
        "episode/sampled": float(np.mean([episode.sampled for episode in survivors])),
        "episode/calls": float(np.mean([len(episode.calls) for episode in survivors])),
    }
    finishes = [call.completion.finish for episode in survivors for call in episode.calls]
    metrics["call/cut_off"] = finishes.count(FinishReason.LENGTH) / max(len(finishes), 1)
    stops = Counter(episode.stop for episode in survivors)
    metrics |= {f"stop/{stop}": stops[stop] / len(survivors) for stop in dict.fromkeys((*STOPS, *stops))}
    if (shared := shared_states(groups)) is not None:
        metrics["group/shared_states"] = shared
    if has_rewards:
        rewards = np.array([episode.reward for episode in survivors])
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        metrics |= {f"reward/{name}": value for name, value in _means(survivors, "rewards").items()}
    means = _means(survivors, "metrics").items()
    return metrics | {name if name.startswith("reward/") else f"episode/{name}": value for name, value in means}


def shared_states(groups: Sequence[Group]) -> float | None:
    """Share of turns after the first whose state also occurs in another episode of their group, which `algorithm=gigpo`
    compares; None without such turns. The first state is the same by definition and does not count."""
    turns = shared = 0
    for group in groups:
        states = [[turn.state_key for turn in episode.turns] for episode in group.valid_episodes]
        episodes_with = Counter(key for keys in states for key in set(keys))
        later = [key for keys in states for key in keys[1:] if key]
        turns += len(later)
        shared += sum(episodes_with[key] > 1 for key in later)
    return shared / turns if turns else None


def _means(episodes: Sequence[Episode], field: str) -> Metrics:
    """Mean of each number; an episode without it counts as 0 (a tool that was not called), but not for `success`."""
    rows: list[dict[str, float]] = [getattr(episode, field) for episode in episodes]
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: float(np.mean([row.get(name, 0.0) for row in rows if name in row or name != "success"])) for name in names
    }


def batch_metrics(forest: Forest, terms: Terms, version: int) -> Metrics:
    """Size of the learner's batch, share of unique tokens, mean |advantage|, and lag of its tokens in versions."""
    num_tokens = sum(len(tree) for tree in forest.trees)
    lag = version - terms.version[terms.version != NOT_SAMPLED]
    return {
        "batch/lag_mean": float(lag.mean()) if len(lag) else 0.0,
        "batch/lag_max": float(lag.max(initial=0)),
        "learner/groups": float(len(forest.trees)),
        "learner/terms": float(len(terms)),
        "learner/tokens": float(num_tokens),
        "learner/unique_share": num_tokens / forest.raw_tokens if forest.raw_tokens else 1.0,
        "learner/advantage_abs": float(np.abs(terms.advantage).mean()) if len(terms) else 0.0,
    }
