"""Training on some of an episode's branches only, without changing what is learned on average.

An episode that edits its context often has many branches, and each costs a pass over its tokens. `thin` keeps at most
`most` of them and makes the kept ones count for those that were dropped, so that the expected gradient of an episode is
that of all its branches (`random`), or its total weight is (`last`).

    kept   = algorithm.keep(groups)
    terms  = algorithm.credit(kept, look(plant(kept)))      # credit sees every branch
    forest, terms = thin(kept, terms, most=2, how="random", seed=derive(run_seed, "thin", step))
    learner.update(forest.trees, terms, algorithm)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from arborl.rollout.tree import plant
from arborl.seeds import generator
from arborl.types import Episode, Floats, Forest, Group, Ints, Terms

How = Literal["last", "random"]


def factors(branches: int, sizes: Sequence[int], most: int, how: How, chance: np.random.Generator) -> Floats:
    """How much each branch counts, 0 where it is dropped.

    `random` always keeps the last and draws the others, each of which then stands for as many as it had a chance of
    being drawn: factor times chance is 1 for every branch. `last` keeps the latest, scaled to the weight of all.

    Example:
        factors(3, [5, 5, 5], 2, "last", chance)      # [0, 1.5, 1.5]
    """
    if branches <= most:
        return np.ones(branches)
    out = np.zeros(branches)
    if how == "last":
        out[-most:] = sum(sizes) / sum(sizes[-most:])
        return out
    if most == 1:  # the last alone cannot stand for the others: any one is drawn
        out[int(chance.integers(branches))] = branches
        return out
    out[-1] = 1.0
    out[chance.choice(branches - 1, size=most - 1, replace=False)] = (branches - 1) / (most - 1)
    return out


def thin(groups: Sequence[Group], terms: Terms, most: int, how: How, seed: int) -> tuple[Forest, Terms]:
    """The forest of the branches that are kept, and their terms with advantages and re-scaled weights.

    Args:
        groups: those the terms came from, in their order.
        terms: credited, of every branch.
        most: branches an episode keeps.
        how: `last`, or `random`.
        seed: decides the draw; the same for the same seed and episode.
    """
    if most < 1:
        raise ValueError(f"most={most}: give 1 or more")
    if how not in ("last", "random"):
        raise ValueError(f"how={how!r}: give last or random")
    kept: list[Group] = []
    factor_C: list[float] = []
    for group in groups:
        episodes = []
        for episode in group.survivors:
            scale = _call_factors(episode, most, how, generator(seed, group.task.id, episode.id, episode.seed))
            factor_C += scale
            calls = [call for call, factor in zip(episode.calls, scale, strict=True) if factor > 0]
            episodes.append(dataclasses.replace(episode, calls=calls))
        kept.append(Group(group.task, episodes, group.greedy))
    forest = plant(kept)
    factor_M = np.asarray(factor_C)[terms.call] if len(terms) else np.zeros(0)
    rows: Ints = np.flatnonzero(factor_M > 0)
    old, fresh = terms.pick(rows), forest.terms
    weight = old.weight * factor_M[rows]
    placed = dataclasses.replace(old, tree=fresh.tree, position=fresh.position, call=fresh.call, weight=weight)
    return dataclasses.replace(forest, terms=placed), placed


def _call_factors(episode: Episode, most: int, how: How, chance: np.random.Generator) -> list[float]:
    branch_C = episode.branches
    count = max(branch_C, default=-1) + 1
    sizes = [0] * count
    for branch, call in zip(branch_C, episode.calls, strict=True):
        sizes[branch] += len(call.completion.tokens)
    scale = factors(count, sizes, most, how, chance)
    return [float(scale[branch]) for branch in branch_C]
