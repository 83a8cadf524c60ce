"""Statistics in which every episode has the same weight, however many turns or tokens it has.

N rows (turns or tokens), each owned by an episode. Standard deviations are the sample's (n - 1), with n episodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arborl.types import Floats, Ints

EPSILON = 1e-6  # added to a standard deviation before division


def shares(owner_N: Ints) -> Floats:
    _, index, counts = np.unique(owner_N, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / counts[index], dtype=np.float64)


def mean(value_N: Floats, owner_N: Ints) -> float:
    """Mean of the owners' means."""
    share_N = shares(owner_N)
    return float((share_N * value_N).sum() / share_N.sum()) if len(value_N) else 0.0


def deviation(value_N: Floats, owner_N: Ints) -> float:
    """Standard deviation around `mean`; 0 for fewer than two owners."""
    owners = len(np.unique(owner_N))
    if owners < 2:
        return 0.0
    distance_N = value_N - mean(value_N, owner_N)
    return float(np.sqrt((shares(owner_N) * distance_N**2).sum() / (owners - 1)))


def whitened(value_N: Floats, owner_N: Ints, centre: bool = True) -> Floats:
    """Values with standard deviation 1 and, with `centre`, mean 0; all 0 if they are constant."""
    if is_constant(value_N):
        return np.zeros(len(value_N))
    middle = mean(value_N, owner_N) if centre else 0.0
    return (value_N - middle) / (deviation(value_N, owner_N) + EPSILON)


def whitened_by_token(value_N: Floats) -> Floats:
    """Values with mean 0 and standard deviation 1, every row with the same weight: (x - mean) / sqrt(var + 1e-8) with
    the sample variance, as verl and ROLL whiten advantages."""
    if is_constant(value_N):
        return np.zeros(len(value_N))
    return np.asarray((value_N - value_N.mean()) / np.sqrt(value_N.var(ddof=1) + 1e-8), dtype=np.float64)


def relative(value_N: Floats, group_N: Ints, owner_N: Ints, baseline: str = "mean", std: str = "none") -> Floats:
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
    return len(value_N) < 2 or bool(np.all(value_N == value_N[0]))
