"""Importance weights for tokens that another policy version or engine sampled, as factors of the advantage.

M terms. ratio = learner / rollout, both before the update. All losses are proportional to the advantage, so a factor of
the advantage is a factor of the loss.
"""

from __future__ import annotations

import numpy as np
import torch

from arborl.algorithms.token_losses import ratio
from arborl.types import Floats, Ints


def ratios(gap_M: Floats, sequence_M: Ints | None = None) -> Floats:
    """Ratios from log-ratios; with `sequence_M`, the geometric mean over each sequence (a product would grow or
    vanish)."""
    if sequence_M is not None:
        _, index, counts = np.unique(sequence_M, return_inverse=True, return_counts=True)
        gap_M = (np.bincount(index, gap_M) / counts)[index]
    return np.asarray(ratio(torch.from_numpy(gap_M)).numpy(), dtype=np.float64)


def truncated(ratio_M: Floats, high: float) -> Floats:
    """Truncated importance sampling: min(ratio, high) (TIS; Yao et al. 2025, "Your efficient RL framework …")."""
    return np.minimum(ratio_M, high)


def masked(ratio_M: Floats, low: float, high: float) -> Floats:
    """Masked importance sampling: the ratio where it lies in [low, high], else 0 (MIS; Liu et al. 2025, "When speed
    kills stability"); with bounds such as [0.5, 5] and token by token it is IcePop (arXiv 2510.18855)."""
    return np.where((ratio_M >= low) & (ratio_M <= high), ratio_M, 0.0)


def importance_weights(kind: str, ratio_M: Floats, low: float, high: float) -> Floats:
    """The importance weights of one kind: `tis`, `mis` or `icepop`."""
    return truncated(ratio_M, high) if kind == "tis" else masked(ratio_M, low, high)


def staleness(version_M: Ints, decay: float) -> Floats:
    """decay^lag, where lag is the number of policy versions between a token's and the newest of the batch."""
    return np.asarray(decay ** (version_M.max(initial=0) - version_M).astype(np.float64), dtype=np.float64)


def overlong_penalty(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476): 0 up to `max_tokens - buffer`, then down to -penalty."""
    over = length - (max_tokens - buffer)
    return penalty * max(min(-over / buffer, 0.0), -1.0)
