"""Advantages per turn or token.

T steps of one episode; N steps of all episodes, each owned by an episode and belonging to a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborl.algorithms.statistics import relative, whitened
from arborl.types import Floats, Ints


def discounted(reward_T: Floats, gamma: float) -> Floats:
    """Discounted returns: R_t = r_t + gamma R_(t+1)."""
    out, ahead = np.zeros(len(reward_T)), 0.0
    for t in range(len(reward_T) - 1, -1, -1):
        out[t] = ahead = reward_T[t] + gamma * ahead
    return out


def gae(
    reward_T: Floats, value_T: Floats, gamma: float = 1.0, lam: float = 0.95, after: float = 0.0
) -> tuple[Floats, Floats]:
    """d_t = r_t + gamma V_(t+1) - V_t, A_t = d_t + gamma lam A_(t+1), target_t = A_t + V_t (Schulman et al. 2015, arXiv
    1506.02438). `after` is V after the last step: 0, or the critic's estimate if the episode was cut short (arXiv
    1712.00378)."""
    ahead = np.append(value_T[1:], after)
    advantage = discounted(reward_T + gamma * ahead - value_T, gamma * lam)
    return advantage, advantage + value_T


def gigpo(
    reward_E: Floats,
    task_E: Ints,
    return_N: Floats,
    episode_N: Ints,
    state_N: Sequence[str],
    std: str = "none",
    step_weight: float = 1.0,
) -> Floats:
    """Group-in-group: A = A_E + omega A_S (GiGPO, arXiv 2505.10978). A_E compares an episode's reward with those of its
    task; A_S a step's discounted return with those of steps from the same state of the same task. A state of one
    episode only, and a step without a state (""), has A_S = 0."""
    whole_E = relative(reward_E, task_E, np.arange(len(reward_E)), std=std)
    numbers: dict[tuple[int, str], int] = {}  # a state is the same state only within its task
    states = zip(task_E[episode_N].tolist(), state_N, strict=True)
    anchor_N = np.array([numbers.setdefault(state, len(numbers)) for state in states], dtype=np.int64)
    named = np.array([bool(state) for state in state_N], dtype=bool)
    step_N = np.zeros(len(return_N))
    if named.any():
        step_N[named] = relative(return_N[named], anchor_N[named], episode_N[named], std=std)
    return np.asarray(whole_E[episode_N] + step_weight * step_N, dtype=np.float64)


def trajectory_returns(rewards: Sequence[Floats], gamma: float = 1.0) -> Floats:
    """R = sum over t of gamma^t r_t of each episode, which StarPO compares (RAGEN, arXiv 2504.20073)."""
    return np.array([float((gamma ** np.arange(len(r)) * r).sum()) for r in rewards], dtype=np.float64)


def step_reinforce(
    return_N: Floats, episode_N: Ints, group_N: Ints, baseline: str = "mean", std: str = "none"
) -> Floats:
    """Each turn's discounted return minus the group's mean over all turns, with equal weight per episode. With
    `std="batch"` this is return batch normalisation (GEM, arXiv 2510.01051) around the group's mean."""
    return relative(return_N, group_N, episode_N, baseline, std)


def turn_discounted(advantage: float, turns: int, gamma: float) -> Floats:
    """An episode's advantage, fading towards its start: A_t = gamma^(T-1-t) A."""
    return np.asarray(advantage * gamma ** np.arange(turns - 1, -1, -1, dtype=np.float64), dtype=np.float64)


def reinforce_plus_plus(reward_N: Floats, episode_N: Ints, centre: bool = True) -> Floats:
    """G_i = sum of r_j over the tokens j >= i of its episode, A = (G - mean) / std, equal weight per episode (arXiv
    2501.03262). With a group baseline, rewards are minus their group's mean, and `centre=False` keeps a
    zero-variance group at 0."""
    to_go = np.zeros(len(reward_N))
    for episode in np.unique(episode_N):
        rows = np.flatnonzero(episode_N == episode)
        to_go[rows] = discounted(reward_N[rows], 1.0)
    return whitened(to_go, episode_N, centre)
