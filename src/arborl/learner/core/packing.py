"""Packs trees end to end into micro-batches of bounded size; each term keeps its context.

Two trees laid end to end are again a tree (see `TokenTree`), so a micro-batch is one longer tree. A tree that is larger
than the budget is split where branches begin: in depth-first order a segment is a run of tokens, and besides each other
these tokens see only the ancestors of the first, which are repeated before the run. With budget 4, the tree 1 2 3 4 5
of [1 2 | 3 4] and [1 2 | 5] becomes 1 2 3 4 and 1 2 5. Trees with a common prefix can be merged, so that it runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from arborl.types import Ints, Terms, TokenTree

MIN_UNIQUE_SHARE = 0.9  # above this share of unique tokens, one plain row per branch is considered instead of a tree
MIN_SHARED_PREFIX = 16  # trees with fewer equal first tokens are not merged


T = TypeVar("T")
Trees = Sequence[TokenTree]


def chunks(items: Iterable[T], fits: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Runs of items; one ends where the next item does not fit."""
    some: list[T] = []
    for item in items:
        if some and not fits(some, item):
            yield some
            some = []
        some.append(item)
    if some:
        yield some


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Trees laid end to end, and their terms."""

    tokens: Ints
    depth: Ints
    end: Ints
    lengths: tuple[int, ...]  # length of each tree; attention never crosses from one tree to the next
    terms: Terms  # `position` counts from the start of the micro-batch
    rows: Ints  # their rows in the terms of the whole batch

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_unbranched(self) -> bool:
        stops = np.repeat(np.cumsum(self.lengths), self.lengths)
        return bool((self.end == stops).all())


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """A run of a tree's tokens in depth-first order, after the ancestors of its first token."""

    number: int  # number of the tree
    places: Ints  # positions of its tokens in the tree: ancestors, then the run
    tree: TokenTree
    rows: Ints  # terms whose predicting token is in the run


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    """Costs of a forward pass, in multiplications per layer."""

    token: float
    pair: float  # of one token attending to another


def split(
    trees: Trees, terms: Terms, budget: int, as_rows: Callable[[TokenTree], bool] | None = None, merge: bool = False
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens by first-fit decreasing; a longer single branch gets its own. Trees for
    which `as_rows` returns True are packed as plain rows, one per branch; with `merge`, trees with a common prefix
    become one."""
    if not len(terms):
        return []
    segments: list[TreeSegment] = []
    order = np.argsort(terms.tree, kind="stable")
    numbers, begins = np.unique(terms.tree[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
        tree = trees[number]
        starts = branch_starts(tree) if as_rows is not None and as_rows(tree) else segment_starts(tree, budget)
        segments.extend(split_tree(tree, number, starts, rows, terms.position))
    segments.sort(key=lambda segment: (-len(segment.tree), segment.number, int(segment.places[-1])))
    bins: list[list[TreeSegment]] = []
    room: list[int] = []
    for segment in segments:
        size = len(segment.tree)
        home = next((b for b, free in enumerate(room) if free >= size), None)
        if home is None:
            bins.append([])
            room.append(budget)
            home = len(bins) - 1
        bins[home].append(segment)
        room[home] -= size
    return [_assemble(chosen, terms, merge) for chosen in bins]


def branch_starts(tree: TokenTree) -> Ints:
    """Where branches begin: tokens that do not continue the previous token."""
    return np.flatnonzero(np.diff(tree.depth, prepend=-2) != 1)


def segment_starts(tree: TokenTree, budget: int) -> Ints:
    """Where to split so that every segment fits with the fewest repeated tokens. A split before token a repeats
    `depth[a]` tokens, and one inside a branch makes no segment smaller: a shortest path over the starts of branches."""
    starts = branch_starts(tree)
    if len(tree) <= budget or len(starts) < 2:
        return starts[:1]
    bounds, above = [*starts.tolist(), len(tree)], tree.depth[starts].tolist()
    repeated = [0.0] * len(bounds)
    following = [len(starts)] * len(bounds)
    for i in range(len(starts) - 1, -1, -1):
        best = float("inf")
        for j in range(i + 1, len(bounds)):
            if j > i + 1 and above[i] + bounds[j] - bounds[i] > budget:
                break
            if above[i] + repeated[j] <= best:  # at equal cost the longer segment
                best, following[i] = above[i] + repeated[j], j
        repeated[i] = best
    chosen, i = [], 0
    while i < len(starts):
        chosen.append(bounds[i])
        i = following[i]
    return np.asarray(chosen)


def split_tree(tree: TokenTree, number: int, starts: Ints, rows: Ints, position: Ints) -> list[TreeSegment]:
    """The segments that begin at `starts`; each term belongs to the segment with its predicting token."""
    if len(starts) < 2:
        return [TreeSegment(number, np.arange(len(tree)), tree, rows)]
    home = np.searchsorted(starts, position[rows], side="right") - 1
    segments = []
    for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(tree)], strict=True)):
        inside = rows[home == i]
        if len(inside):
            places = np.concatenate([np.flatnonzero(tree.end[:start] > start), np.arange(start, stop)])
            part = TokenTree(tree.tokens[places], tree.depth[places], np.searchsorted(places, tree.end[places]))
            segments.append(TreeSegment(number, places, part, inside))
    return segments


def rows_are_cheaper(tree: TokenTree, costs: ForwardCosts) -> bool:
    """Whether one plain row per branch costs less than the tree: rows need no mask, and attend to half a square
    each."""
    leaves = np.flatnonzero(tree.end == np.arange(len(tree)) + 1)
    lengths = tree.depth[leaves] + 1
    raw = int(lengths.sum())
    if len(leaves) < 2 or len(tree) <= MIN_UNIQUE_SHARE * raw:
        return False
    block = 32
    firsts = tree.depth[::block]
    pairs = min(len(tree) ** 2, int((block * (firsts + block)).sum()))
    return raw * costs.token + (lengths**2).sum() / 2 * costs.pair < len(tree) * costs.token + pairs * costs.pair


def padding_micro_batch() -> MicroBatch:
    a, n = np.zeros(1), np.zeros(1, dtype=np.int64)
    terms = Terms(n, n, n, a, a, a, n, n, n, n, a, a, a, a, a, a)
    return MicroBatch(n, n, n + 1, (1,), terms, np.zeros(0, dtype=np.int64))


def has_split_tree(batches: Sequence[MicroBatch]) -> bool:
    numbers = [number for batch in batches if len(batch.rows) for number in set(batch.terms.tree.tolist())]
    return len(numbers) != len(set(numbers))


def token_positions(trees: Trees, terms: Terms) -> Ints:
    """The position of each term's own token in its tree: the child of the predicting token with that token."""
    found = []
    for number, position, token in zip(terms.tree, terms.position, terms.token, strict=True):
        tree = trees[number]
        below = np.arange(position + 1, tree.end[position])
        children = below[tree.depth[below] == tree.depth[position] + 1]
        found.append(int(children[tree.tokens[children] == token][0]))
    return np.array(found, dtype=np.int64)


def prune_tree(tree: TokenTree, position: Ints) -> tuple[TokenTree, Ints]:
    """The tree reduced to these positions and their ancestors, and the new positions."""
    wanted = np.unique(position)
    here = np.arange(len(tree))
    places = np.flatnonzero(np.searchsorted(wanted, tree.end) > np.searchsorted(wanted, here))
    part = TokenTree(tree.tokens[places], tree.depth[places], np.searchsorted(places, tree.end[places]))
    return part, np.searchsorted(places, position)


def pack(trees: Trees, numbers: Sequence[int], terms: Terms) -> MicroBatch:
    return _assemble(
        [
            TreeSegment(number, np.arange(len(tree)), tree, np.flatnonzero(terms.tree == number))
            for tree, number in zip(trees, numbers, strict=True)
        ],
        terms,
    )


def _assemble(segments: Sequence[TreeSegment], terms: Terms, merge: bool = False) -> MicroBatch:
    merged = [
        merge_segments(chosen)
        for chosen in (_group_by_prefix(segments) if merge else [[segment] for segment in segments])
    ]
    lengths = tuple(len(tree) for tree, _ in merged)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    placed = [
        (segment, at + offset)
        for (_, positions), offset in zip(merged, offsets, strict=True)
        for segment, at in positions
    ]
    rows = np.concatenate([segment.rows for segment, _ in placed])
    position = [at[np.searchsorted(segment.places, terms.position[segment.rows])] for segment, at in placed]
    return MicroBatch(
        np.concatenate([tree.tokens for tree, _ in merged]),
        np.concatenate([tree.depth for tree, _ in merged]),
        np.concatenate([tree.end + offset for (tree, _), offset in zip(merged, offsets, strict=True)]),
        lengths,
        replace(terms.pick(rows), position=np.concatenate(position).astype(np.int64)),
        rows,
    )


def _stem(tree: TokenTree) -> int:
    over = np.flatnonzero(tree.end < len(tree))
    return int(over[0]) if len(over) else len(tree)


def _group_by_prefix(segments: Sequence[TreeSegment]) -> list[list[TreeSegment]]:
    """Segments grouped by equal first tokens of their stems."""
    groups: dict[object, list[TreeSegment]] = {}
    for number, segment in enumerate(segments):
        begins = (
            segment.tree.tokens[:MIN_SHARED_PREFIX].tobytes() if _stem(segment.tree) >= MIN_SHARED_PREFIX else number
        )
        groups.setdefault(begins, []).append(segment)
    return list(groups.values())


def merge_segments(segments: Sequence[TreeSegment]) -> tuple[TokenTree, list[tuple[TreeSegment, Ints]]]:
    """One tree from segments with a common prefix, and the positions of each segment's tokens in it. Longer shared
    prefixes come first, so that each stem token is followed by its own subtree."""
    first, shares = segments[0].tree, []
    for segment in segments[1:]:
        most = min(_stem(first), _stem(segment.tree))
        differ = np.flatnonzero(first.tokens[:most] != segment.tree.tokens[:most])
        shares.append(int(differ[0]) if len(differ) else most)
    tokens, depth, end = [first.tokens], [first.depth], [first.end.copy()]
    positions, total = [(segments[0], np.arange(len(first)))], len(first)
    for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
        tree, share = segments[i + 1].tree, shares[i]
        appended = np.arange(total - share, total - share + len(tree))
        positions.append((segments[i + 1], np.where(np.arange(len(tree)) < share, np.arange(len(tree)), appended)))
        tokens.append(tree.tokens[share:])
        depth.append(tree.depth[share:])
        end.append(tree.end[share:] + total - share)
        total += len(tree) - share
        end[0][:share] = total
    return TokenTree(np.concatenate(tokens), np.concatenate(depth), np.concatenate(end)), positions


ALIGNMENT = 16  # bytes: kernels copy tensors that do not start at a multiple


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Copy arrays of one dtype to the device. To a GPU they go in one asynchronous copy from pinned memory."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    step = ALIGNMENT // arrays[0].itemsize
    starts = np.cumsum([0, *(-(-array.size // step) * step for array in arrays)])
    flat = torch.empty(int(starts[-1]), dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=True)
    for array, start in zip(arrays, starts.tolist(), strict=False):
        flat.numpy()[start : start + array.size] = array.reshape(-1)
    uploaded = flat.to(device, non_blocking=True)
    return [
        uploaded[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]
