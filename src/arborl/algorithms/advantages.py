"""How much better an episode did than it might have. Statistics are over episodes, one vote each.

Every function takes the rewards of the surviving episodes, group by group, and returns numbers of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborl.types import Floats

SMALL = 1e-6
"""Added to a standard deviation before dividing by it."""


def grpo(rewards: Sequence[Floats], baseline: str = "mean", std: str = "none") -> list[Floats]:
    """Reward minus the group's mean, divided by a standard deviation if asked.

    A group of one, and one whose rewards are all equal, has advantage exactly 0. `std="group"` divides by the
    group's own deviation (GRPO as published), `"batch"` by that of all episodes' rewards, `"none"` not at all
    (Dr. GRPO). Deviations are the sample's (n - 1).

    Example:
        grpo([np.array([1.0, 0.0])])                  -> [array([0.5, -0.5])]
        grpo([np.array([1.0, 0.0])], std="group")     -> [array([0.707, -0.707])]     # 0.5 / 0.7071
    """
    everything = np.concatenate([np.zeros(0), *rewards])
    spread = float(np.std(everything, ddof=1)) if len(everything) > 1 else 0.0
    return [_centred(group, baseline, std, spread) for group in rewards]


def _centred(group: Floats, baseline: str, std: str, batch_spread: float) -> Floats:
    if baseline == "none":
        difference = group.astype(float)
    elif is_flat(group):
        return np.zeros(len(group))
    else:
        difference = group - group.mean()
    if std == "none":
        return difference
    spread = batch_spread if std == "batch" else float(np.std(group, ddof=1)) if len(group) > 1 else 0.0
    return difference / (spread + SMALL)


def is_flat(group: Floats) -> bool:
    """Nothing to compare: no two episodes with different rewards."""
    return len(group) < 2 or bool(np.all(group == group[0]))
