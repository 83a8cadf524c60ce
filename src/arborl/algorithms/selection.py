"""Selection of episodes and groups that have a gradient; everything dropped is counted."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from arborl.algorithms import preference_losses, turn_advantages
from arborl.algorithms.reward_arrays import is_overlong, turn_rewards, with_overlong_penalty
from arborl.algorithms.statistics import is_constant
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.types import Episode, Group

DropReasons = dict[tuple[str, int], str]
"""Reason for which each dropped episode is not trained, by its id and seed; without failed ones."""


def select(groups: Sequence[Group], config: AlgorithmConfig) -> tuple[list[Group], Counter[str], DropReasons]:
    """The groups to learn from, without unusable episodes; the numbers of dropped ones by reason: episodes, or groups
    for reasons such as `zero_variance`; and the reason of each episode. A group that loses no episode is returned as
    the same object."""
    dropped: Counter[str] = Counter()
    kept, reasons = [], DropReasons()
    for group in groups:
        dropped["failed"] += len(group.episodes) - len(group.valid_episodes)
        found = _drop_episodes(group, config, dropped, reasons)
        why = _group_drop_reason(with_overlong_penalty(found, config.overlong), config)
        if why:
            dropped[why] += 1
            reasons.update(((episode.id, episode.seed), why) for episode in found.valid_episodes)
            continue
        if config.loss in ("dpo", "ipo"):
            found = _keep_pairs(found, config, dropped, reasons)
        kept.append(found)
    return kept, +dropped, reasons


def reasons(config: AlgorithmConfig) -> list[str]:
    """Every reason for which this algorithm may drop an episode or a group; they are counted even at 0."""
    may = {
        "overlong": config.overlong.filter,
        "below_threshold": config.loss == "sft",
        "no_pair": config.loss in ("dpo", "ipo"),
        "outside_pairs": config.loss in ("dpo", "ipo"),
        "no_greedy": config.advantage == "remax",
        "negative_reward": config.advantage == "maxrl",
        "zero_variance": config.drops_zero_variance,
    }
    return ["failed", "reward_not_finite", "empty_group", "nothing_sampled", *(why for why, can in may.items() if can)]


def _drop_episodes(group: Group, config: AlgorithmConfig, dropped: Counter[str], reasons: DropReasons) -> Group:
    found = {id(episode): why for episode in group.valid_episodes if (why := _episode_drop_reason(episode, config))}
    dropped.update(found.values())
    if not found:
        return group
    reasons.update(((e.id, e.seed), found[id(e)]) for e in group.episodes if id(e) in found)
    return dataclasses.replace(group, episodes=[e for e in group.episodes if id(e) not in found])


def _episode_drop_reason(episode: Episode, config: AlgorithmConfig) -> str:
    """Why an episode is removed from baseline and loss; empty if it is kept."""
    rewards = (*episode.rewards.values(), *(turn.reward for turn in episode.turns))
    if not all(math.isfinite(reward) for reward in rewards):
        return "reward_not_finite"
    if config.overlong.filter and is_overlong(episode):
        return "overlong"
    if config.loss == "sft" and episode.reward < config.options.reward_threshold:
        return "below_threshold"
    return ""


def _group_drop_reason(group: Group, config: AlgorithmConfig) -> str:
    survivors = group.valid_episodes
    if not survivors:
        return "empty_group"
    if not any(episode.sampled for episode in survivors):
        return "nothing_sampled"
    if config.loss in ("dpo", "ipo"):
        return "" if _pairs(survivors, config).any() else "no_pair"
    if config.loss in ("kto", "sft", "distill"):
        return ""
    if config.advantage == "remax" and (group.greedy is None or not math.isfinite(group.greedy)):
        return "no_greedy"
    if config.advantage == "maxrl" and min(episode.reward for episode in survivors) < 0:
        return "negative_reward"
    if config.drops_zero_variance and CONSTANT.get(config.advantage, _constant_rewards)(survivors, config):
        return "zero_variance"
    return ""


def _pairs(episodes: Sequence[Episode], config: AlgorithmConfig) -> torch.Tensor:
    """Which episodes are preferred to which; episodes without sampled tokens are in no pair."""
    score = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
    sampled = torch.tensor([e.sampled > 0 for e in episodes])
    same = torch.zeros(len(episodes), dtype=torch.int64)
    return preference_losses.pairs(score, same, config.options.min_gap) & sampled[:, None] & sampled[None, :]


def _keep_pairs(group: Group, config: AlgorithmConfig, dropped: Counter[str], reasons: DropReasons) -> Group:
    """The episodes that are part of a pair; with `pairs=best_worst` the best and the worst (first of equals)."""
    survivors = group.valid_episodes
    scored = with_overlong_penalty(Group(group.task, survivors), config.overlong).episodes
    found = _pairs(scored, config)
    if config.options.pairs == "best_worst":
        places = [i for i, episode in enumerate(scored) if episode.sampled]
        chosen = [max(places, key=lambda i: scored[i].reward), min(places, key=lambda i: scored[i].reward)]
        kept = [survivors[i] for i in sorted(chosen)]
    else:
        kept = [episode for i, episode in enumerate(survivors) if found[i].any() or found[:, i].any()]
    dropped["outside_pairs"] += len(survivors) - len(kept)
    inside = {id(episode) for episode in kept}
    reasons.update(((e.id, e.seed), "outside_pairs") for e in survivors if id(e) not in inside)
    return group if len(kept) == len(group.episodes) else dataclasses.replace(group, episodes=kept)


def _constant_rewards(episodes: Sequence[Episode], config: AlgorithmConfig) -> bool:
    return is_constant(np.array([episode.reward for episode in episodes]))


def _constant_by_name(episodes: Sequence[Episode], config: AlgorithmConfig) -> bool:
    """GDPO compares each reward: their sum may be constant where they are not."""
    names = {name for episode in episodes for name in episode.rewards}
    return all(is_constant(np.array([episode.rewards.get(name, 0.0) for episode in episodes])) for name in names)


def _constant_returns(episodes: Sequence[Episode], config: AlgorithmConfig) -> bool:
    if len(episodes) < 2:
        return True
    return is_constant(np.concatenate([turn_advantages.discounted(turn_rewards(e), config.gamma) for e in episodes]))


def _constant_trajectories(episodes: Sequence[Episode], config: AlgorithmConfig) -> bool:
    return is_constant(
        turn_advantages.trajectory_returns([turn_rewards(episode) for episode in episodes], config.gamma)
    )


def _constant_in_every_state(episodes: Sequence[Episode], config: AlgorithmConfig) -> bool:
    """GiGPO also compares steps from equal states, which may differ if episodes do not."""
    if not _constant_rewards(episodes, config):
        return False
    seen: dict[str, list[tuple[int, float]]] = {}
    for number, episode in enumerate(episodes):
        returns = turn_advantages.discounted(turn_rewards(episode), config.gamma)
        for turn, value in zip(episode.turns, returns, strict=False):
            if turn.state_key:
                seen.setdefault(turn.state_key, []).append((number, float(value)))
    return all(len({n for n, _ in rows}) < 2 or len({v for _, v in rows}) < 2 for rows in seen.values())


CONSTANT: dict[str, Callable[[Sequence[Episode], AlgorithmConfig], bool]] = {
    "gdpo": _constant_by_name,
    "gigpo": _constant_in_every_state,
    "starpo": _constant_trajectories,
    "step_reinforce": _constant_returns,
}  # advantages that compare something else than the episode's reward
