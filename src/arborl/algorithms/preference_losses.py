"""Losses over whole episodes and pairs of them: DPO, IPO, KTO.

Each function gives, for every episode, the exact derivative of the loss with respect to the episode's summed
log-probability. The term loss is then that number times the token's log-probability: its value means nothing, its
gradient is exact, however a batch is split.

E episodes. `gain_E` is log policy - log reference, summed over the episode's sampled tokens. `score_E` says which of
two episodes of one group is the better.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-6
"""Scores that differ by less are equal: they may have passed through float32."""


def pairs(score_E: Tensor, group_E: Tensor, min_gap: float = 0.0) -> Tensor:
    """Whether i is preferred to j, for all i, j: same group, and a score that is higher by more than `min_gap`.

    >>> pairs(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1])).nonzero().tolist()
    [[0, 1]]
    """
    same_EE = group_E[:, None] == group_E[None, :]
    return same_EE & (score_E[:, None] - score_E[None, :] > min_gap + TOLERANCE)


def dpo(gain_E: Tensor, pair_EE: Tensor, beta: float = 0.1) -> Tensor:
    """Derivatives of the sum over pairs of -log sigmoid(beta (gain_i - gain_j)) (DPO, arXiv 2305.18290).

    For the better one -beta sigmoid(-beta h), h = gain_i - gain_j, for the worse one the opposite.

    >>> better = pairs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    >>> dpo(torch.tensor([0.0, 0.0]).double(), better, beta=0.1).tolist()     # 0.1 * sigmoid(0)
    [-0.05, 0.05]
    """
    pull_EE = beta * torch.sigmoid(-beta * (gain_E[:, None] - gain_E[None, :])) * pair_EE
    return pull_EE.sum(0) - pull_EE.sum(1)


def ipo(gain_E: Tensor, length_E: Tensor, pair_EE: Tensor, beta: float = 0.1) -> Tensor:
    """Derivatives of the sum over pairs of (h - 1 / (2 beta))^2 (IPO, arXiv 2310.12036).

    h is the difference of the gains per token: sums would make the square grow with length.

    >>> better, two = pairs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])), torch.tensor([2.0, 2.0])
    >>> ipo(torch.tensor([4.0, 0.0]), two, better, beta=0.25).tolist()     # h = 2 = 1 / (2 * 0.25): nothing to do
    [0.0, 0.0]
    """
    each_E = gain_E / length_E
    push_EE = 2 * (each_E[:, None] - each_E[None, :] - 1 / (2 * beta)) * pair_EE
    return (push_EE.sum(1) - push_EE.sum(0)) / length_E


def kto(gain_E: Tensor, good_E: Tensor, group_E: Tensor, beta: float = 0.1) -> Tensor:
    """Derivatives of the sum of 1 - sigmoid(±beta (gain - z)), plus for good episodes (KTO, arXiv 2402.01306).

    z is the policy's KL from the reference, held fixed: the mean gain of the group's episodes, at least 0. They were
    sampled from the policy, or nearly, so no mismatched pairs are needed to estimate it.

    >>> kto(torch.zeros(2).double(), torch.tensor([True, False]), torch.tensor([0, 0]), beta=0.4).tolist()     # 0.4 / 4
    [-0.1, 0.1]
    """
    same_EE = (group_E[:, None] == group_E[None, :]).to(gain_E.dtype)
    z_E = ((same_EE @ gain_E) / same_EE.sum(1)).clamp(min=0)
    sign_E = torch.where(good_E, 1.0, -1.0).to(gain_E.dtype)
    chance_E = torch.sigmoid(sign_E * beta * (gain_E - z_E))
    return -sign_E * beta * chance_E * (1 - chance_E)
