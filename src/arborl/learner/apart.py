"""Asking once more, tree by tree and episode by episode, where an answer is not a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from arborl.learner.packing import pruned
from arborl.types import Floats, Terms, TokenTree

Ask = Callable[[Sequence[TokenTree], Terms], tuple[Floats, Floats]]
"""Two numbers a term."""


def ask_apart(ask: Ask, trees: Sequence[TokenTree], terms: Terms) -> tuple[Floats, Floats]:
    """What `ask` says. What is not finite spreads to everything that is attended to beside it, so each tree is then
    asked alone, and in it each episode on a tree of its own."""
    first, second = ask(trees, terms)
    bad = np.unique(terms.tree[~np.isfinite(first + second)])
    if len(np.unique(terms.tree)) > 1:
        for number in bad:
            rows = np.flatnonzero(terms.tree == number)
            first[rows], second[rows] = ask_apart(ask, trees, terms.pick(rows))
    elif len(bad) and len(np.unique(terms.episode)) > 1:
        for number in np.unique(terms.episode):
            rows = np.flatnonzero(terms.episode == number)
            tree, position = pruned(trees[int(bad[0])], terms.position[rows])
            own = dataclasses.replace(terms.pick(rows), tree=np.zeros_like(rows), position=position)
            first[rows], second[rows] = ask_apart(ask, [tree], own)
    return first, second
