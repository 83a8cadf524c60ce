"""Training on some of an episode's branches only, without changing what is learned on average.

An episode that edits its context often has many branches, and each costs a pass over its tokens. `thin` keeps at most
`most` of them and makes the kept ones count for those that were dropped, so that the expected gradient of an episode is
that of all its branches (`random`), or its total weight is (`last`).

    kept   = algorithm.keep(groups)
    terms  = algorithm.credit(kept, look(plant(kept)))      # credit sees every branch
    forest, terms, dropped = thin(kept, terms, most=2, how="random", seed=derive(run_seed, "step", step, "thin"))
    learner.update(forest.trees, terms, algorithm)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from arborl.rollout.tree import plant
from arborl.seeds import generator
from arborl.types import Episode, Floats, Forest, Group, Ints, Metrics, Terms

How = Literal["last", "random"]


def factors(weights: Sequence[float], most: int, how: How, chance: np.random.Generator) -> Floats:
    """How much each branch counts, 0 where it is dropped; `weights` are what they have of the loss.

    `random` always keeps the last and draws the others, each of which then stands for as many as it had a chance of
    being drawn: factor times chance is 1 for every branch. `last` keeps the latest, scaled to the weight of all.

    Example:
        factors([0.1, 0.1, 0.1], 2, "last", chance)      # [0, 1.5, 1.5]
    """
    branches = len(weights)
    if branches <= most:
        return np.ones(branches)
    out = np.zeros(branches)
    if how == "last":
        held = sum(weights[-most:])
        out[-most:] = sum(weights) / held if held > 0 else 1.0
        return out
    if most == 1:  # the last alone cannot stand for the others: any one is drawn
        out[int(chance.integers(branches))] = branches
        return out
    out[-1] = 1.0
    out[chance.choice(branches - 1, size=most - 1, replace=False)] = (branches - 1) / (most - 1)
    return out


def thin(groups: Sequence[Group], terms: Terms, most: int, how: How, seed: int) -> tuple[Forest, Terms, Metrics]:
    """The forest of the branches that are kept, their terms with re-scaled weights, and how much was left out.

    Every other column of a term is as it was: advantage, log-probabilities of policy and reference, value, target.

    Args:
        groups: those the terms came from, in their order.
        terms: credited, of every branch.
        most: branches an episode keeps.
        how: `last`, or `random`.
        seed: decides the draw; the same for the same seed and episode, whatever else is in the batch.
    """
    if most < 1:
        raise ValueError(f"most={most}: give 1 or more")
    if how not in ("last", "random"):
        raise ValueError(f"how={how!r}: give last or random")
    calls = sum(len(episode.calls) for group in groups for episode in group.valid_episodes)
    weight_C = np.bincount(terms.call, terms.weight, minlength=calls).astype(np.float64)
    kept: list[Group] = []
    factor_C: list[float] = []
    dropped = 0
    for group in groups:
        episodes = []
        for episode in group.valid_episodes:
            chance = generator(seed, group.task.id, episode.id, episode.seed)
            own_C = weight_C[len(factor_C) : len(factor_C) + len(episode.calls)]
            scale, fewer = _call_factors(episode, own_C, most, how, chance)
            factor_C += scale
            dropped += fewer
            spared = [call for call, factor in zip(episode.calls, scale, strict=True) if factor > 0]
            episodes.append(dataclasses.replace(episode, calls=spared))
        kept.append(Group(group.task, episodes, group.greedy))
    forest = plant(kept)
    factor_M = np.asarray(factor_C)[terms.call] if len(terms) else np.zeros(0)
    rows: Ints = np.flatnonzero(factor_M > 0)
    old, fresh = terms.pick(rows), forest.terms
    weight = old.weight * factor_M[rows]
    placed = dataclasses.replace(old, tree=fresh.tree, position=fresh.position, call=fresh.call, weight=weight)
    metrics = {"thinned/branches": float(dropped), "thinned/terms": float(len(terms) - len(placed))}
    return dataclasses.replace(forest, terms=placed), placed, metrics


def _call_factors(
    episode: Episode, weight_C: Floats, most: int, how: How, chance: np.random.Generator
) -> tuple[list[float], int]:
    """The factor of each call, and how many branches are dropped. A branch without a trained token is none."""
    branch_C = episode.branches
    weight_B = np.bincount(branch_C, weight_C)
    spoken = sorted(
        {
            branch
            for branch, call in zip(branch_C, episode.calls, strict=True)
            if call.trained and call.completion.tokens
        }
    )
    scale = dict(zip(spoken, factors(weight_B[spoken].tolist(), most, how, chance).tolist(), strict=True))
    return [scale.get(branch, 0.0) for branch in branch_C], max(len(spoken) - most, 0)
