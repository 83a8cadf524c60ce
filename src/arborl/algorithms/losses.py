"""Losses over flat vectors, one entry per term. Each returns the loss of every term; summing is not theirs.

M terms. `new_M` carries the gradient; everything else is data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TermBatch:
    """The columns of `Terms` that losses read, as tensors."""

    old_M: Tensor
    """Log-probability under the policy that sampled the token."""
    advantage_M: Tensor
    weight_M: Tensor
    episode_M: Tensor
    call_M: Tensor
    reference_M: Tensor | None = None
    """Log-probability under the reference policy, where the algorithm needs one."""


LossParts = tuple[Tensor, dict[str, Tensor]]
"""The loss of every term, and vectors whose means are worth logging."""


def ppo_clip(new_M: Tensor, terms: TermBatch, clip_low: float, clip_high: float) -> LossParts:
    """PPO's clipped surrogate: no reward for moving a token's ratio beyond [1 - clip_low, 1 + clip_high]."""
    ratio_M = (new_M - terms.old_M).exp()
    held_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    free_M, bound_M = ratio_M * terms.advantage_M, held_M * terms.advantage_M
    return -torch.minimum(free_M, bound_M), {
        "policy/ratio": ratio_M.detach(),
        "policy/clipped": (bound_M < free_M).detach().float(),
    }
