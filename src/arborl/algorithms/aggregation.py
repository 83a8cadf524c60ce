"""How much each term counts. The loss of a step is the weighted sum, so these hold all of its normalisation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from arborl.algorithms.statistics import shares
from arborl.types import Floats, Ints, Terms


def by_token(episode: Ints) -> Floats:
    """Every token has the same share (DAPO, BNPO).

    >>> by_token(np.array([0, 0, 1, 1])).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    return np.full(len(episode), 1.0 / max(len(episode), 1))


def by_episode(episode: Ints) -> Floats:
    """Every episode has the same share, which its tokens divide equally; its number of branches does not matter (GRPO).

    >>> by_episode(np.array([0, 0, 1])).tolist()
    [0.25, 0.25, 0.5]
    """
    return shares(episode) / len(np.unique(episode)) if len(episode) else np.zeros(0)


def by_length(episode: Ints, length: int) -> Floats:
    """Every token has the share of one in an episode of this length, however long its own is (Dr. GRPO).

    >>> by_length(np.array([0, 0, 1]), 10).tolist()
    [0.05, 0.05, 0.05]
    """
    return np.full(len(episode), 1.0 / max(len(np.unique(episode)) * length, 1))


def weighed(weight: Floats, factor: Floats) -> Floats:
    """The weights times a factor each, with the same sum as before: a row of weight 2 counts as two of weight 1.

    >>> weighed(np.array([0.5, 0.5]), np.array([1.0, 3.0])).tolist()
    [0.25, 0.75]
    """
    total = float((weight * factor).sum())
    return weight if not total or (factor == 1).all() else weight * factor * (weight.sum() / total)


WEIGHTS: dict[str, Callable[[Terms, int], Floats]] = {
    "token": lambda terms, length: by_token(terms.episode),
    "episode": lambda terms, length: by_episode(terms.episode),
    "call": lambda terms, length: by_episode(terms.call),
    "fixed": lambda terms, length: by_length(terms.episode, length),
}

COUNTS: dict[str, Callable[[Terms], float]] = {
    "token": lambda terms: float(len(terms)),
    "episode": lambda terms: float(len(np.unique(terms.episode))),
    "call": lambda terms: float(len(np.unique(terms.call))),
    "fixed": lambda terms: float(len(np.unique(terms.episode))),
}
"""What each is a mean over, and how many of it there are."""
