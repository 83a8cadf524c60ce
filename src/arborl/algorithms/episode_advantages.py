"""Advantages per episode. Every episode has the same weight in all statistics.

Each function takes the rewards of the surviving episodes, group by group, and returns numbers of the same shape. A
group with one episode or with equal rewards has advantage exactly 0 wherever a group is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from arborl.algorithms.statistics import is_constant as is_constant
from arborl.algorithms.statistics import relative, whitened
from arborl.types import Floats

Rewards = Sequence[Floats]
"""Of the surviving episodes, one array per group."""


def grpo(rewards: Rewards, baseline: str = "mean", std: str = "none") -> list[Floats]:
    """Reward minus the group's mean, optionally divided by a standard deviation.

    A = (r - mean) / std. `std="group"` divides by the group's own deviation (GRPO as published: DeepSeekMath,
    arXiv 2402.03300), `"batch"` by that of all episodes' rewards, `"none"` not at all (Dr. GRPO, arXiv 2503.20783).

    >>> grpo([np.array([1.0, 0.0])])[0].tolist()
    [0.5, -0.5]
    >>> grpo([np.array([1.0, 0.0])], std="group")[0].round(4).tolist()     # 0.5 / 0.7071
    [0.7071, -0.7071]
    """
    flat, sizes = np.concatenate([np.zeros(0), *rewards]), [len(group) for group in rewards]
    group_E = np.repeat(np.arange(len(sizes)), sizes)
    return _split(relative(flat, group_E, np.arange(len(flat)), baseline, std), sizes)


def rloo(rewards: Rewards) -> list[Floats]:
    """Reward minus the mean of the other episodes of its group: A_i = r_i - mean of r_j, j ≠ i.

    REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740).

    >>> rloo([np.array([1.0, 0.0, 0.0])])[0].tolist()
    [1.0, -0.5, -0.5]
    """
    return [_unless_constant(group, lambda r: (r - r.mean()) * len(r) / (len(r) - 1)) for group in rewards]


def reinforce(rewards: Rewards) -> list[Floats]:
    """The reward itself (Williams 1992).

    >>> reinforce([np.array([1.0, 0.0])])[0].tolist()
    [1.0, 0.0]
    """
    return [group.astype(np.float64) for group in rewards]


def remax(rewards: Rewards, greedy: Sequence[float]) -> list[Floats]:
    """Reward minus that of the likeliest episode of the task: A = r - r_greedy (ReMax, arXiv 2310.10505).

    >>> remax([np.array([1.0, 0.0])], [0.25])[0].tolist()
    [0.75, -0.25]
    """
    return [group - base for group, base in zip(rewards, greedy, strict=True)]


def opo(rewards: Rewards, lengths: Rewards) -> list[Floats]:
    """Reward minus the baseline of least variance, the mean weighted by length: A = r - sum(l r) / sum(l).

    On-policy RL with optimal baseline (arXiv 2505.23585). Lengths are sampled tokens.

    >>> opo([np.array([1.0, 0.0])], [np.array([3.0, 1.0])])[0].tolist()     # baseline 3 / 4
    [0.25, -0.75]
    """
    return [
        np.zeros(len(group))
        if is_constant(group) or not length.any()
        else group - (length * group).sum() / length.sum()
        for group, length in zip(rewards, lengths, strict=True)
    ]


def maxrl(rewards: Rewards) -> list[Floats]:
    """Reward minus the group's mean, divided by that mean: A = (r - mean) / mean.

    Maximum-likelihood RL: with rewards 0 and 1 the gradient is that of the log of the success rate, so rare success
    counts more. Rewards must not be negative.

    >>> maxrl([np.array([1.0, 0.0, 0.0, 0.0])])[0].tolist()     # mean 1/4
    [3.0, -1.0, -1.0, -1.0]
    """
    for group in rewards:
        if len(group) and group.min() < 0:
            raise ValueError(f"maxrl divides by the mean reward, which must not be negative; given {group.tolist()}")
    return [_unless_constant(group, lambda r: (r - r.mean()) / r.mean()) for group in rewards]


def gdpo(
    rewards: Mapping[str, Rewards], weights: Mapping[str, float] | None = None, whiten: bool = False
) -> list[Floats]:
    """Each reward compared on its own scale, then added up: A = sum over k of w_k (r_k - mean_k) / std_k.

    Group reward-decoupled normalisation (GDPO, arXiv 2601.05242): normalising the sum instead lets a reward with a
    large scale drown the others. `whiten` divides by the batch's deviation afterwards.

    >>> a, b = [np.array([1.0, 0.0])], [np.array([0.0, 10.0])]
    >>> gdpo({"a": a, "b": b}, {"b": 0.5})[0].round(4).tolist()     # 0.7071 - 0.5 * 0.7071
    [0.3536, -0.3536]
    """
    sizes = [len(group) for group in next(iter(rewards.values()), ())]
    total = np.zeros(sum(sizes))
    for name, column in rewards.items():
        weight = 1.0 if weights is None else weights.get(name, 1.0)
        total += weight * np.concatenate([np.zeros(0), *grpo(column, std="group")])
    if whiten:
        total = whitened(total, np.arange(len(total)), centre=False)
    return _split(total, sizes)


def rae(
    rewards: Rewards, roles: Sequence[str], baselines: Mapping[str, float], decay: float = 0.95
) -> tuple[list[Floats], dict[str, float]]:
    """Reward minus a running mean of its role's: b' = decay b + (1 - decay) mean of r, A = r - b'.

    Role-conditioned advantage (SPIRAL, arXiv 2506.24119), for self-play, where sides differ in how easy they are. The
    baseline moves once a step, by the mean over the step's episodes, so their order does not matter; a role that is
    new starts at that mean.

    Args:
        roles: of each group.
        baselines: as the last step left them.

    >>> groups = [np.array([1.0, 0.0]), np.array([1.0])]
    >>> found, after = rae(groups, ["first", "second"], {"first": 0.1}, decay=0.5)
    >>> found[0].round(4).tolist(), found[1].tolist(), after     # 0.5 * 0.1 + 0.5 * 0.5
    ([0.7, -0.3], [0.0], {'first': 0.3, 'second': 1.0})
    """
    after = dict(baselines)
    for role in dict.fromkeys(roles):
        role_rewards = np.concatenate([np.zeros(0), *(r for r, of in zip(rewards, roles, strict=True) if of == role)])
        if len(role_rewards):
            after[role] = decay * baselines.get(role, float(role_rewards.mean())) + (1 - decay) * float(
                role_rewards.mean()
            )
    return [group - after.get(role, 0.0) for group, role in zip(rewards, roles, strict=True)], after


def split_shares(branches: int, how: str, ratio: float = 0.9) -> Floats:
    """The share of an episode's advantage for each of its branches, in order.

    `broadcast`: 1 each; `last`: all to the last; `uniform`: equal shares; `geometric`: in proportion to ratio^(n-1-k),
    with sum 1. The advantage is split and not the reward: a reward of 0 for early branches would enter the group's
    mean.

    >>> split_shares(3, "geometric", 0.5).round(4).tolist()     # 1/4, 1/2, 1 over 7/4
    [0.1429, 0.2857, 0.5714]
    """
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
    """A flat array split into groups of these sizes."""
    return np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []
