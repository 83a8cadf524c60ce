"""Advantages per episode, from the rewards of the surviving episodes, group by group. Every episode has the same weight
in all statistics. A group with one episode or with equal rewards has advantage exactly 0 wherever a group is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from arborl.algorithms.statistics import EPSILON, relative
from arborl.algorithms.statistics import is_constant as is_constant
from arborl.types import Floats

Rewards = Sequence[Floats]  # of the surviving episodes, one array per group


def grpo(rewards: Rewards, baseline: str = "mean", std: str = "none") -> list[Floats]:
    """A = (r - mean) / std. `std="group"` divides by the group's deviation (GRPO: DeepSeekMath, arXiv 2402.03300),
    `"batch"` by that of all episodes' rewards, `"none"` not at all (Dr. GRPO, arXiv 2503.20783)."""
    flat, sizes = np.concatenate([np.zeros(0), *rewards]), [len(group) for group in rewards]
    group_E = np.repeat(np.arange(len(sizes)), sizes)
    return _split(relative(flat, group_E, np.arange(len(flat)), baseline, std), sizes)


def rloo(rewards: Rewards) -> list[Floats]:
    """REINFORCE leave-one-out: A_i = r_i - mean of r_j, j ≠ i (Ahmadian et al. 2024, arXiv 2402.14740)."""
    return [_unless_constant(group, lambda r: (r - r.mean()) * len(r) / (len(r) - 1)) for group in rewards]


def reinforce(rewards: Rewards) -> list[Floats]:
    """The reward itself (Williams 1992)."""
    return [group.astype(np.float64) for group in rewards]


def remax(rewards: Rewards, greedy: Sequence[float]) -> list[Floats]:
    """A = r - r_greedy, the reward of the task's likeliest episode (ReMax, arXiv 2310.10505)."""
    return [group - base for group, base in zip(rewards, greedy, strict=True)]


def opo(rewards: Rewards, lengths: Rewards) -> list[Floats]:
    """Reward minus the baseline of least variance: A = r - sum(l r) / sum(l), l = sampled tokens (arXiv 2505.23585)."""
    return [
        np.zeros(len(group))
        if is_constant(group) or not length.any()
        else group - (length * group).sum() / length.sum()
        for group, length in zip(rewards, lengths, strict=True)
    ]


def maxrl(rewards: Rewards) -> list[Floats]:
    """A = (r - mean) / mean (maximum-likelihood RL): with rewards 0 and 1 the gradient is that of the log of the
    success rate, so rare success counts more. Rewards must not be negative."""
    for group in rewards:
        if len(group) and group.min() < 0:
            raise ValueError(f"maxrl divides by the mean reward, which must not be negative; given {group.tolist()}")
    return [_unless_constant(group, lambda r: (r - r.mean()) / r.mean()) for group in rewards]


def pass_k(rewards: Rewards, std: str = "none") -> list[Floats]:
    """A_i = max of r - max of r_j, j ≠ i: only the best episode has an advantage, its lead over the second (the
    leave-one-out baseline of the best of k; Tang et al. 2025, arXiv 2503.19595). `std` as for `grpo`."""
    flat = np.concatenate([np.zeros(0), *rewards])
    return [_unless_constant(group, lambda r: _lead(r) / _spread(r, flat, std)) for group in rewards]


def _lead(rewards: Floats) -> Floats:
    second, best = np.sort(rewards)[-2:]
    return np.where(rewards == best, best - second, 0.0)


def _spread(group: Floats, batch: Floats, std: str) -> float:
    return 1.0 if std == "none" else float((group if std == "group" else batch).std(ddof=1)) + EPSILON


def gdpo(rewards: Mapping[str, Rewards], weights: Mapping[str, float] | None = None) -> list[Floats]:
    """A = sum over k of w_k (r_k - mean_k) / std_k (GDPO, arXiv 2601.05242): normalising the sum of rewards instead
    lets one with a large scale drown the others."""
    sizes = [len(group) for group in next(iter(rewards.values()), ())]
    total = np.zeros(sum(sizes))
    for name, column in rewards.items():
        weight = 1.0 if weights is None else weights.get(name, 1.0)
        total += weight * np.concatenate([np.zeros(0), *grpo(column, std="group")])
    return _split(total, sizes)


def rae(
    rewards: Rewards, roles: Sequence[str], baselines: Mapping[str, float], decay: float = 0.95
) -> tuple[list[Floats], dict[str, float]]:
    """Role-conditioned advantage for self-play (SPIRAL, arXiv 2506.24119): b' = decay b + (1 - decay) mean of r, A = r
    - b', with one baseline per role (`roles`, of each group). It moves once a step; a new role starts at its mean."""
    after = dict(baselines)
    for role in dict.fromkeys(roles):
        role_rewards = np.concatenate([np.zeros(0), *(r for r, of in zip(rewards, roles, strict=True) if of == role)])
        if len(role_rewards):
            after[role] = decay * baselines.get(role, float(role_rewards.mean())) + (1 - decay) * float(
                role_rewards.mean()
            )
    return [group - after.get(role, 0.0) for group, role in zip(rewards, roles, strict=True)], after


def split_shares(branches: int, how: str, ratio: float = 0.9) -> Floats:
    """The share of an episode's advantage for each of its branches. `geometric`: in proportion to ratio^(n-1-k), with
    sum 1. The advantage is split and not the reward: a reward of 0 for early branches would enter the group's mean."""
    if how == "broadcast":
        return np.ones(branches)
    if how == "last":
        return np.append(np.zeros(branches - 1), 1.0)
    if how == "uniform":
        return np.full(branches, 1.0 / branches)
    parts = ratio ** np.arange(branches - 1, -1, -1, dtype=np.float64)
    return np.asarray(parts / parts.sum(), dtype=np.float64)


def _unless_constant(group: Floats, rule: Callable[[Floats], Floats]) -> Floats:
    return np.zeros(len(group)) if is_constant(group) else rule(group)


def _split(flat: Floats, sizes: Sequence[int]) -> list[Floats]:
    return np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []
