"""Trees are laid end to end into micro-batches of bounded size; each term keeps its place.

Two trees laid end to end are again a tree (see `TokenTree`), so a micro-batch is nothing but a longer tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from arborl.types import Ints, Terms, TokenTree


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some trees, end to end, and the terms that live in them."""

    tokens: Ints
    depth: Ints
    end: Ints
    lengths: tuple[int, ...]
    """Of each tree: attention never crosses from one to the next."""
    terms: Terms
    """`position` counts from the start of the micro-batch."""
    rows: Ints
    """Which rows of the whole batch's terms these are."""


def split(trees: Sequence[TokenTree], terms: Terms, budget: int) -> Iterator[MicroBatch]:
    """Micro-batches of at most `budget` tokens; a larger tree travels alone.

    Longest first into the first that has room, so the split is tight and depends on sizes alone.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted({int(t) for t in terms.tree}, key=lambda t: (-len(trees[t]), t)):
        size = len(trees[index])
        home = next((b for b, free in enumerate(room) if free >= size), None)
        if home is None:
            bins.append([])
            room.append(budget)
            home = len(bins) - 1
        bins[home].append(index)
        room[home] -= size
    for chosen in bins:
        yield pack([trees[t] for t in chosen], chosen, terms)


def pack(trees: Sequence[TokenTree], numbers: Sequence[int], terms: Terms) -> MicroBatch:
    """Lay these trees end to end. `numbers` are their indices in `terms.tree`."""
    lengths = tuple(len(tree) for tree in trees)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    where = dict(zip(numbers, offsets, strict=True))
    rows = np.flatnonzero(np.isin(terms.tree, numbers))
    own = terms.pick(rows)
    shift = np.array([where[int(t)] for t in own.tree], dtype=np.int64)
    return MicroBatch(
        np.concatenate([tree.tokens for tree in trees]),
        np.concatenate([tree.depth for tree in trees]),
        np.concatenate([tree.end + offset for tree, offset in zip(trees, offsets, strict=True)]),
        lengths,
        replace(own, position=own.position + shift),
        rows,
    )
