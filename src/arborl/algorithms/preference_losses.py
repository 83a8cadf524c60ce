"""Losses over whole episodes and pairs of them: DPO, IPO, KTO.

Each function gives two numbers an episode: the exact derivative of the loss with respect to the episode's summed
log-probability, and the episode's part of the loss itself (of a pair's, half). The term loss then has the derivative as
its gradient and the token's part as its value, so that both are exact, however a batch is split.

E episodes. `gain_E` is log policy - log reference, summed over the episode's sampled tokens. `score_E` says which of
two episodes of one group is the better.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Pulls = tuple[Tensor, Tensor]
"""Derivative and part of the loss, of each episode."""

TOLERANCE = 1e-6
"""Scores that differ by less are equal: they may have passed through float32."""


def pairs(score_E: Tensor, group_E: Tensor, min_gap: float = 0.0) -> Tensor:
    """Whether i is preferred to j, for all i, j: same group, and a score that is higher by more than `min_gap`.

    >>> pairs(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1])).nonzero().tolist()
    [[0, 1]]
    """
    same_EE = group_E[:, None] == group_E[None, :]
    return same_EE & (score_E[:, None] - score_E[None, :] > min_gap + TOLERANCE)


def dpo(gain_E: Tensor, pair_EE: Tensor, beta: float = 0.1) -> Pulls:
    """The sum over pairs of -log sigmoid(beta (gain_i - gain_j)) (DPO, arXiv 2305.18290).

    Its derivative is for the better one -beta sigmoid(-beta h), h = gain_i - gain_j, for the worse one the opposite.

    >>> better = pairs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    >>> pull, loss = dpo(torch.tensor([0.0, 0.0]).double(), better, beta=0.1)
    >>> pull.tolist(), round(loss.sum().item(), 6)     # 0.1 * sigmoid(0), log 2
    ([-0.05, 0.05], 0.693147)
    """
    margin_EE = beta * (gain_E[:, None] - gain_E[None, :])
    pull_EE = beta * torch.sigmoid(-margin_EE) * pair_EE
    return pull_EE.sum(0) - pull_EE.sum(1), _halves(-F.logsigmoid(margin_EE) * pair_EE)


def ipo(gain_E: Tensor, length_E: Tensor, pair_EE: Tensor, beta: float = 0.1) -> Pulls:
    """The sum over pairs of (h - 1 / (2 beta))^2 (IPO, arXiv 2310.12036).

    h is the difference of the gains per token: sums would make the square grow with length.

    >>> better, two = pairs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])), torch.tensor([2.0, 2.0])
    >>> ipo(torch.tensor([4.0, 0.0]), two, better, beta=0.25)[0].tolist()     # h = 2 = 1 / (2 * 0.25): nothing to do
    [0.0, 0.0]
    """
    each_E = gain_E / length_E
    short_EE = (each_E[:, None] - each_E[None, :] - 1 / (2 * beta)) * pair_EE
    return 2 * (short_EE.sum(1) - short_EE.sum(0)) / length_E, _halves(short_EE.square())


def _halves(loss_EE: Tensor) -> Tensor:
    """Each pair's loss, half to either."""
    return (loss_EE.sum(0) + loss_EE.sum(1)) / 2


def kto(gain_E: Tensor, good_E: Tensor, level_E: Tensor, beta: float = 0.1) -> Pulls:
    """The sum of 1 - sigmoid(±beta (gain - z)), plus for good episodes (KTO, arXiv 2402.01306).

    Args:
        level_E: z, the policy's KL from the reference, held fixed: `group_level` of episodes that the policy sampled,
            `stranger_level` of given ones.

    >>> pull, loss = kto(torch.zeros(2).double(), torch.tensor([True, False]), torch.zeros(2), beta=0.4)
    >>> pull.tolist(), loss.tolist()     # 0.4 / 4
    ([-0.1, 0.1], [0.5, 0.5])
    """
    sign_E = torch.where(good_E, 1.0, -1.0).to(gain_E.dtype)
    chance_E = torch.sigmoid(sign_E * beta * (gain_E - level_E))
    return -sign_E * beta * chance_E * (1 - chance_E), 1 - chance_E


def group_level(gain_E: Tensor, group_E: Tensor) -> Tensor:
    """The KL as the mean gain of a group's episodes, at least 0: they were sampled from the policy, or nearly.

    >>> group_level(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0, 0, 1])).tolist()
    [1.5, 1.5, 0.0]
    """
    same_EE = (group_E[:, None] == group_E[None, :]).to(gain_E.dtype)
    return ((same_EE @ gain_E) / same_EE.sum(1)).clamp(min=0)


def stranger_level(gain_E: Tensor) -> float:
    """The KL as the mean gain of completions under prompts of others, at least 0: KTO's own estimate where nothing is
    sampled.

    >>> stranger_level(torch.tensor([1.0, 2.0]))
    1.5
    """
    return max(float(gain_E.mean()), 0.0)
