"""Assigns trees to ranks so that all ranks have about the same work in every optimizer step.

A tree stays whole on its rank, where it is split if it is larger than a micro-batch. So losses over whole groups are
computed on one rank, and no episode is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborl.learner.core.packing import ForwardCosts
from arborl.types import Floats, Ints, Terms, TokenTree

EMPTY_TREE = TokenTree(*[np.zeros(0, dtype=np.int64)] * 3)
"""Placeholder for trees of other ranks, so that tree numbers stay those of the batch."""


def tree_work(trees: Sequence[TokenTree], terms: Terms, costs: ForwardCosts) -> Floats:
    """Multiplications per layer of each tree; 0 for a tree without terms, which is not run."""
    work = np.zeros(len(trees))
    for number in np.unique(terms.tree):
        tree = trees[number]
        work[number] = len(tree) * costs.token + float((tree.depth + 1).sum()) * costs.pair
    return work


def assign_balanced(work: Floats, ranks: int) -> Ints:
    """The rank of each item: largest first to the rank with the least work, then exchanges between the ranks with the
    most and the least.

    Example:
        assign_balanced(np.array([4.0, 3.0, 3.0, 2.0]), 2)     # array([0, 1, 1, 0])
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
        left = np.abs(gap - 2 * moved)  # the remaining gap after exchanging one item for another, or for none
        at, other = np.unravel_index(int(np.argmin(left)), left.shape)
        if left[at, other] >= gap * (1 - 1e-9):
            break
        owner[full[at]] = least
        if other < len(free):
            owner[free[other]] = most
        load[most] -= moved[at, other]
        load[least] += moved[at, other]
    return owner


def tree_owners(
    trees: Sequence[TokenTree], terms: Terms, ranks: int, minibatches: Sequence[Ints], costs: ForwardCosts
) -> Ints:
    """The rank of each tree, balanced within each mini-batch."""
    work, owner = tree_work(trees, terms, costs), np.zeros(len(trees), dtype=np.int64)
    for numbers in minibatches:
        owner[numbers] = assign_balanced(work[numbers], ranks)
    return owner


def rank_part(
    trees: Sequence[TokenTree], terms: Terms, owner: Ints, rank: int
) -> tuple[Sequence[TokenTree], Terms, Ints]:
    """The trees and terms of one rank, and their rows among all terms."""
    rows = np.flatnonzero(owner[terms.tree] == rank)
    own = [tree if owner[number] == rank else EMPTY_TREE for number, tree in enumerate(trees)]
    return own, terms.pick(rows), rows


def imbalance(trees: Sequence[TokenTree], terms: Terms, owner: Ints, ranks: int, costs: ForwardCosts) -> float:
    """The largest work of a rank relative to the mean, minus 1."""
    load = np.bincount(owner, tree_work(trees, terms, costs), minlength=ranks)
    return float(load.max() / load.mean() - 1) if load.sum() > 0 else 0.0
