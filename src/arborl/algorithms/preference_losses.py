"""Losses over whole episodes and pairs of episodes: DPO, IPO, KTO.

Each function returns two numbers per episode: the exact derivative of the loss with respect to the episode's summed
log-probability, and the episode's part of the loss (half of a pair's). The term loss then has the derivative as its
gradient and the token's part as its value, so both are exact however a batch is split.

E episodes. `gain_E` is log policy - log reference, summed over the episode's sampled tokens. `score_E` orders the
episodes of a group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EpisodeLosses = tuple[Tensor, Tensor]  # derivative and part of the loss of each episode

TOLERANCE = 1e-6  # scores that differ by less are equal: they may have been rounded to float32


def pairs(score_E: Tensor, group_E: Tensor, min_gap: float = 0.0) -> Tensor:
    """Whether i is preferred to j, for all i, j: same group, and a score that is higher by more than `min_gap`."""
    same_EE = group_E[:, None] == group_E[None, :]
    return same_EE & (score_E[:, None] - score_E[None, :] > min_gap + TOLERANCE)


def dpo(gain_E: Tensor, pair_EE: Tensor, beta: float = 0.1) -> EpisodeLosses:
    """The sum over pairs of -log sigmoid(beta h), h = gain_i - gain_j (DPO, arXiv 2305.18290)."""
    margin_EE = beta * (gain_E[:, None] - gain_E[None, :])
    gradient_EE = beta * torch.sigmoid(-margin_EE) * pair_EE
    return gradient_EE.sum(0) - gradient_EE.sum(1), _halves(-F.logsigmoid(margin_EE) * pair_EE)


def ipo(gain_E: Tensor, length_E: Tensor, pair_EE: Tensor, beta: float = 0.1) -> EpisodeLosses:
    """The sum over pairs of (h - 1 / (2 beta))^2 (IPO, arXiv 2310.12036), h the difference of the gains per token."""
    mean_E = gain_E / length_E
    gap_EE = (mean_E[:, None] - mean_E[None, :] - 1 / (2 * beta)) * pair_EE
    return 2 * (gap_EE.sum(1) - gap_EE.sum(0)) / length_E, _halves(gap_EE.square())


def _halves(loss_EE: Tensor) -> Tensor:
    """Each pair's loss, half to each episode."""
    return (loss_EE.sum(0) + loss_EE.sum(1)) / 2


def kto(gain_E: Tensor, good_E: Tensor, kl_E: Tensor, beta: float = 0.1) -> EpisodeLosses:
    """The sum of 1 - sigmoid(±beta (gain - z)), plus for desirable episodes (KTO, arXiv 2402.01306)."""
    sign_E = torch.where(good_E, 1.0, -1.0).to(gain_E.dtype)
    probability_E = torch.sigmoid(sign_E * beta * (gain_E - kl_E))
    return -sign_E * beta * probability_E * (1 - probability_E), 1 - probability_E


def group_kl(gain_E: Tensor, group_E: Tensor) -> Tensor:
    """The KL as the mean gain of a group's episodes, at least 0; they were sampled from the policy or nearly so."""
    same_EE = (group_E[:, None] == group_E[None, :]).to(gain_E.dtype)
    return ((same_EE @ gain_E) / same_EE.sum(1)).clamp(min=0)


def mismatched_kl(gain_E: Tensor) -> float:
    """The KL as the mean gain of completions paired with other prompts, at least 0: KTO's estimate without sampling."""
    return max(float(gain_E.mean()), 0.0)
