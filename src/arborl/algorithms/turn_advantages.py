"""Advantages per turn or token.

T steps of one episode; N steps of all episodes, each owned by an episode and belonging to a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborl.algorithms.statistics import relative, whitened
from arborl.types import Floats, Ints


def discounted(reward_T: Floats, gamma: float) -> Floats:
    """Discounted returns: R_t = r_t + gamma R_(t+1).

    >>> discounted(np.array([0.0, 0.0, 1.0]), 0.5).tolist()
    [0.25, 0.5, 1.0]
    """
    out, ahead = np.zeros(len(reward_T)), 0.0
    for t in range(len(reward_T) - 1, -1, -1):
        out[t] = ahead = reward_T[t] + gamma * ahead
    return out


def gae(
    reward_T: Floats, value_T: Floats, gamma: float = 1.0, lam: float = 0.95, after: float = 0.0
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation of one episode, and the critic's targets.

    d_t = r_t + gamma V_(t+1) - V_t, A_t = d_t + gamma lam A_(t+1), target_t = A_t + V_t (Schulman et al. 2015, arXiv
    1506.02438). A step is a turn or a token, as the arrays say.

    Args:
        after: V after the last step: 0 where the episode came to its end, the critic's estimate where it was cut short
            (Pardo et al. 2018, arXiv 1712.00378).

    >>> advantage, target = gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), gamma=1.0, lam=0.5)
    >>> advantage.tolist(), target.tolist()     # d = [-0.25, 0.75]; -0.25 + 0.5 * 0.75
    ([0.125, 0.75], [0.625, 1.0])
    >>> gae(np.array([1.0]), np.array([0.25]), gamma=0.5, after=0.5)[0].tolist()     # 1 + 0.5 * 0.5 - 0.25
    [1.0]
    """
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
    """Group-in-group: the episode compared with its group, plus each step with others taken in the same state.

    A = A_E + omega A_S. A_E compares an episode's reward with those of its task; A_S compares a step's discounted
    return with those of steps from the same state *of the same task* (GiGPO, arXiv 2505.10978). Both are normalised
    alike, with equal weight per episode: a state of one episode only, and a step without a state (""), has A_S = 0.

    Args:
        reward_E, task_E: of each episode.
        return_N, episode_N, state_N: of each turn.

    >>> reward, task = np.array([1.0, 0.0]), np.array([0, 0])
    >>> returns, episode = np.array([0.5, 1.0, 0.0]), np.array([0, 0, 1])
    >>> gigpo(reward, task, returns, episode, ["start", "door", "start"]).tolist()     # +-0.5, and +-0.25 at start
    [0.75, 0.5, -0.75]
    """
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
    """Return of each episode from its start, the number that StarPO compares (RAGEN, arXiv 2504.20073).

    R = sum over t of gamma^t r_t, given the rewards of each episode's turns.

    >>> trajectory_returns([np.array([0.0, 1.0]), np.array([1.0])], 0.5).tolist()
    [0.5, 1.0]
    """
    return np.array([float((gamma ** np.arange(len(r)) * r).sum()) for r in rewards], dtype=np.float64)


def step_reinforce(
    return_N: Floats, episode_N: Ints, group_N: Ints, baseline: str = "mean", std: str = "none"
) -> Floats:
    """Each turn's discounted return minus the group's mean over all turns, with equal weight per episode.

    With `std="batch"` this is return batch normalisation (GEM, arXiv 2510.01051) around the group's mean.

    >>> step_reinforce(np.array([0.5, 1.0, 0.25]), np.array([0, 0, 1]), np.array([0, 0, 0])).tolist()     # mean 0.5
    [0.0, 0.5, -0.25]
    """
    return relative(return_N, group_N, episode_N, baseline, std)


def turn_discounted(advantage: float, turns: int, gamma: float) -> Floats:
    """An episode's advantage, fading towards its start: A_t = gamma^(T-1-t) A.

    >>> turn_discounted(1.0, 3, 0.5).tolist()
    [0.25, 0.5, 1.0]
    """
    return np.asarray(advantage * gamma ** np.arange(turns - 1, -1, -1, dtype=np.float64), dtype=np.float64)


def reinforce_plus_plus(reward_N: Floats, episode_N: Ints, centre: bool = True) -> Floats:
    """What is still to come at each token, brought to mean 0 and deviation 1 over the batch (arXiv 2501.03262).

    G_i = sum of r_j over the tokens j >= i of its episode, A = (G - mean) / std, equal weight per episode. With a group
    baseline the rewards come in less their group's mean, and `centre=False` leaves a zero-variance group at exactly 0.

    Args:
        reward_N: of each token; an episode's tokens stand together and in order.

    >>> reinforce_plus_plus(np.array([0.0, 1.0, -1.0]), np.array([0, 0, 1])).round(4).tolist()     # G = 1 1 -1
    [0.7071, 0.7071, -0.7071]
    """
    to_go = np.zeros(len(reward_N))
    for episode in np.unique(episode_N):
        rows = np.flatnonzero(episode_N == episode)
        to_go[rows] = discounted(reward_N[rows], 1.0)
    return whitened(to_go, episode_N, centre)
