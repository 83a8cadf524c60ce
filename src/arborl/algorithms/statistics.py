"""Statistics in which every episode has the same weight, however many turns or tokens it has.

N rows (turns or tokens), each owned by an episode. Standard deviations are the sample's (n - 1), with n episodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arborl.types import Floats, Ints

EPSILON = 1e-6
"""Added to a standard deviation before division."""


def shares(owner_N: Ints) -> Floats:
    """The weight of each row: 1 / number of its owner's rows.

    >>> shares(np.array([7, 7, 9])).tolist()
    [0.5, 0.5, 1.0]
    """
    _, index, counts = np.unique(owner_N, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / counts[index], dtype=np.float64)


def mean(value_N: Floats, owner_N: Ints) -> float:
    """Mean of the owners' means.

    >>> float(mean(np.array([1.0, 3.0, 6.0]), np.array([0, 0, 1])))     # (2 + 6) / 2
    4.0
    """
    share_N = shares(owner_N)
    return float((share_N * value_N).sum() / share_N.sum()) if len(value_N) else 0.0


def deviation(value_N: Floats, owner_N: Ints) -> float:
    """Standard deviation around `mean`; 0 for fewer than two owners.

    >>> round(deviation(np.array([1.0, 3.0]), np.array([0, 1])), 6)     # sqrt((1 + 1) / (2 - 1))
    1.414214
    >>> deviation(np.array([1.0, 3.0]), np.array([0, 0]))
    0.0
    """
    owners = len(np.unique(owner_N))
    if owners < 2:
        return 0.0
    distance_N = value_N - mean(value_N, owner_N)
    return float(np.sqrt((shares(owner_N) * distance_N**2).sum() / (owners - 1)))


def whitened(value_N: Floats, owner_N: Ints, centre: bool = True) -> Floats:
    """Values with standard deviation 1 and, with `centre`, mean 0; all 0 if they are constant.

    >>> whitened(np.array([1.0, 3.0]), np.array([0, 1])).round(4).tolist()     # -1 / 1.4142, 1 / 1.4142
    [-0.7071, 0.7071]
    >>> whitened(np.array([5.0, 5.0]), np.array([0, 1]), centre=False).tolist()
    [0.0, 0.0]
    """
    if is_constant(value_N):
        return np.zeros(len(value_N))
    middle = mean(value_N, owner_N) if centre else 0.0
    return (value_N - middle) / (deviation(value_N, owner_N) + EPSILON)


def whitened_by_token(value_N: Floats) -> Floats:
    """Values with mean 0 and standard deviation 1, every row with the same weight: (x - mean) / sqrt(var + 1e-8) with
    the sample variance, as verl and ROLL whiten advantages.

    >>> whitened_by_token(np.array([1.0, 1.0, 4.0])).round(4).tolist()     # mean 2, variance 3
    [-0.5774, -0.5774, 1.1547]
    """
    if is_constant(value_N):
        return np.zeros(len(value_N))
    return np.asarray((value_N - value_N.mean()) / np.sqrt(value_N.var(ddof=1) + 1e-8), dtype=np.float64)


def relative(value_N: Floats, group_N: Ints, owner_N: Ints, baseline: str = "mean", std: str = "none") -> Floats:
    """Each value minus its group's mean, optionally divided by a standard deviation.

    A group with one owner or with constant values is exactly 0.

    Args:
        baseline: `mean`, or `none` to subtract nothing.
        std: `none`, the `group`'s standard deviation, or that of the whole `batch`.

    >>> relative(np.array([1.0, 0.0, 7.0]), np.array([0, 0, 1]), np.array([0, 1, 2])).tolist()
    [0.5, -0.5, 0.0]
    """
    out = np.zeros(len(value_N))
    everything = deviation(value_N, owner_N)
    for group in np.unique(group_N):
        rows = np.flatnonzero(group_N == group)
        value, owner = value_N[rows], owner_N[rows]
        if baseline == "mean" and (is_constant(value) or len(np.unique(owner)) < 2):
            continue
        difference = value - mean(value, owner) if baseline == "mean" else value
        spread = everything if std == "batch" else deviation(value, owner)
        out[rows] = difference if std == "none" else difference / (spread + EPSILON)
    return out


def is_constant(value_N: NDArray[np.float64]) -> bool:
    """Whether no two values differ."""
    return len(value_N) < 2 or bool(np.all(value_N == value_N[0]))
