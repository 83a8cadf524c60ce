"""Estimators of KL(policy || reference) from one sampled token (Schulman, "Approximating KL Divergence", 2020).

With r = reference(token) / policy(token): k1 = -log r is unbiased and may be negative; k2 = (log r)^2 / 2 is biased and
smooth (`mse` is its other name); k3 = r - 1 - log r is unbiased and never negative; abs = |log r|.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arborl.algorithms.token_losses import FARTHEST


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    return 0.5 * (policy - reference).square()


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    difference = (reference - policy).clamp(-FARTHEST, FARTHEST)
    return torch.expm1(difference) - difference


def distance(policy: Tensor, reference: Tensor) -> Tensor:
    return (policy - reference).abs()


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "mse": k2, "abs": distance}


def adapted(coef: float, kl: float, target: float, episodes: int, horizon: int) -> float:
    """The penalty's next coefficient, up where the KL is above its target and down where it is below.

    coef (1 + clip(kl / target - 1, ±0.2) episodes / horizon), the controller of Ziegler et al. 2019 (arXiv 1909.08593).

    >>> round(adapted(0.1, kl=9.0, target=6.0, episodes=100, horizon=1000), 6)     # 1.5 - 1, held at 0.2
    0.102
    """
    return coef * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * min(episodes / horizon, 1.0))
