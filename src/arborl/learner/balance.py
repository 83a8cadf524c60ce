"""Which rank runs which trees: each about as much work as another, in every step of an update.

A tree stays whole on its rank, where it is cut as ever if it is larger than a micro-batch. So what a loss says of whole
groups is said in one place, and no episode is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from arborl.learner.packing import Costs
from arborl.types import Floats, Ints, Terms, TokenTree

NOTHING = TokenTree(*[np.zeros(0, dtype=np.int64)] * 3)
"""In place of trees that a rank does not have: their numbers stay those of the batch."""


def work_of(trees: Sequence[TokenTree], terms: Terms, costs: Costs) -> Floats:
    """Multiplications a layer that each tree costs; one without terms is not run."""
    work = np.zeros(len(trees))
    for number in np.unique(terms.tree):
        tree = trees[number]
        work[number] = len(tree) * costs.token + float((tree.depth + 1).sum()) * costs.pair
    return work


def deal(work: Floats, ranks: int) -> Ints:
    """Who does which: the largest first, each to who has least; then what evens out the fullest and the emptiest.

    Example:
        deal(np.array([4.0, 3.0, 3.0, 2.0]), 2)     # array([0, 1, 1, 0])
    """
    owner, load = np.zeros(len(work), dtype=np.int64), np.zeros(ranks)
    for number in np.argsort(-work, kind="stable"):
        owner[number] = np.argmin(load)
        load[owner[number]] += work[number]
    for _ in range(4 * len(work)):
        most, least = int(np.argmax(load)), int(np.argmin(load))
        gap = load[most] - load[least]
        full, free = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        if gap <= 0 or not len(full):
            break
        moved = np.concatenate([work[full][:, None] - work[free][None, :], work[full][:, None]], axis=1)
        left = np.abs(gap - 2 * moved)  # what lies between the two if one is exchanged for another, or for nothing
        at, other = np.unravel_index(int(np.argmin(left)), left.shape)
        if left[at, other] >= gap * (1 - 1e-9):
            break
        owner[full[at]] = least
        if other < len(free):
            owner[free[other]] = most
        load[most] -= moved[at, other]
        load[least] += moved[at, other]
    return owner


def owners(trees: Sequence[TokenTree], terms: Terms, ranks: int, minibatches: Sequence[Ints], costs: Costs) -> Ints:
    """The rank of each tree, even in each minibatch."""
    work, owner = work_of(trees, terms, costs), np.zeros(len(trees), dtype=np.int64)
    for numbers in minibatches:
        owner[numbers] = deal(work[numbers], ranks)
    return owner


def share(
    trees: Sequence[TokenTree], terms: Terms, owner: Ints, rank: int
) -> tuple[list[TokenTree], Terms, NDArray[np.int64]]:
    """What a rank is given: trees, terms, and which rows of all terms these are."""
    rows = np.flatnonzero(owner[terms.tree] == rank)
    mine = [tree if owner[number] == rank else NOTHING for number, tree in enumerate(trees)]
    return mine, replace(terms.pick(rows)), rows
