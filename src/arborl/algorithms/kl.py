"""Three estimators of KL(policy || reference) from one sampled token (Schulman, "Approximating KL Divergence", 2020).

With r = reference(token) / policy(token): k1 = -log r is unbiased and may be negative; k2 = (log r)^2 / 2 is biased and
smooth; k3 = r - 1 - log r is unbiased and never negative.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    return 0.5 * (policy - reference).square()


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    difference = reference - policy
    return torch.expm1(difference) - difference


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
