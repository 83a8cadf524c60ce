"""Trees are laid end to end into micro-batches of bounded size; each term keeps its context.

Two trees laid end to end are again a tree (see `TokenTree`), so a micro-batch is nothing but a longer tree. A tree that
is too large is cut where branches begin: in depth-first order a piece is a run of tokens, and what these see besides
each other are the ancestors of the first, which are repeated in front of it.

Trees of one micro-batch that begin alike may share that beginning, as the prompts of different tasks do that have the
same system message and tools: then they are one tree, whose stem is run once.

Example (budget 4; the tree of [1 2 | 3 4] and [1 2 | 5]):
    tokens 1 2 3 4 5   ->   1 2 3 4   and   1 2 5, which predicts only what follows its own token 5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from arborl.types import Ints, Terms, TokenTree

SHARED_LITTLE = 0.9
"""Above this share of unique tokens, plain rows are considered in place of a tree."""
ALIKE = 16
"""Trees that begin with fewer equal tokens are left apart."""


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

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chains(self) -> bool:
        """Whether no tree branches."""
        stops = np.repeat(np.cumsum(self.lengths), self.lengths)
        return bool((self.end == stops).all())


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a tree's tokens in depth-first order, behind the ancestors of the first."""

    number: int
    """Which tree."""
    places: Ints
    """Its tokens' places in that tree: ancestors, then the run."""
    tree: TokenTree
    rows: Ints
    """The terms whose predicting token is in the run."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What running the model costs, to choose between a tree and plain rows; in multiplications a layer."""

    token: float
    pair: float
    """Of one token looking at another."""


def split(
    trees: Sequence[TokenTree],
    terms: Terms,
    budget: int,
    plain: Callable[[TokenTree], bool] | None = None,
    shared: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens; a single branch that is longer travels alone.

    Longest first into the first that has room, so the split is tight and depends on sizes alone. A tree that `plain`
    says yes to is taken as plain rows, one a branch. With `shared`, trees that begin alike become one.
    """
    if not len(terms):
        return []
    pieces: list[Piece] = []
    order = np.argsort(terms.tree, kind="stable")
    numbers, begins = np.unique(terms.tree[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
        tree = trees[number]
        starts = branches(tree) if plain is not None and plain(tree) else cuts(tree, budget)
        pieces.extend(cut(tree, number, starts, rows, terms.position))
    pieces.sort(key=lambda piece: (-len(piece.tree), piece.number, int(piece.places[-1])))
    bins: list[list[Piece]] = []
    room: list[int] = []
    for piece in pieces:
        size = len(piece.tree)
        home = next((b for b, free in enumerate(room) if free >= size), None)
        if home is None:
            bins.append([])
            room.append(budget)
            home = len(bins) - 1
        bins[home].append(piece)
        room[home] -= size
    return [_assemble(chosen, terms, shared) for chosen in bins]


def branches(tree: TokenTree) -> Ints:
    """Where branches begin: tokens that do not continue the one before them."""
    return np.flatnonzero(np.diff(tree.depth, prepend=-2) != 1)


def cuts(tree: TokenTree, budget: int) -> Ints:
    """Where to cut so that every piece fits, with the fewest tokens repeated.

    A cut before token a repeats `depth[a]` tokens. Cutting inside a branch could make no piece smaller: its last token
    needs all of it. So this is a shortest path over beginnings of branches, found from the back.
    """
    starts = branches(tree)
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
            if above[i] + repeated[j] <= best:  # at equal cost the longer piece
                best, following[i] = above[i] + repeated[j], j
        repeated[i] = best
    chosen, i = [], 0
    while i < len(starts):
        chosen.append(bounds[i])
        i = following[i]
    return np.asarray(chosen)


def cut(tree: TokenTree, number: int, starts: Ints, rows: Ints, position: Ints) -> list[Piece]:
    """The pieces that begin at `starts`; each term goes to the one whose run holds its predicting token."""
    if len(starts) < 2:
        return [Piece(number, np.arange(len(tree)), tree, rows)]
    home = np.searchsorted(starts, position[rows], side="right") - 1
    pieces = []
    for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(tree)], strict=True)):
        own = rows[home == i]
        if len(own):
            places = np.concatenate([np.flatnonzero(tree.end[:start] > start), np.arange(start, stop)])
            part = TokenTree(tree.tokens[places], tree.depth[places], np.searchsorted(places, tree.end[places]))
            pieces.append(Piece(number, places, part, own))
    return pieces


def rows_pay(tree: TokenTree, costs: Costs) -> bool:
    """Whether plain rows, one a branch, cost less than the tree: they attend without a mask, to half a square each."""
    leaves = np.flatnonzero(tree.end == np.arange(len(tree)) + 1)
    lengths = tree.depth[leaves] + 1
    raw = int(lengths.sum())
    if len(leaves) < 2 or len(tree) <= SHARED_LITTLE * raw:
        return False
    block = 32
    firsts = tree.depth[::block]
    pairs = min(len(tree) ** 2, int((block * (firsts + block)).sum()))
    return raw * costs.token + (lengths**2).sum() / 2 * costs.pair < len(tree) * costs.token + pairs * costs.pair


def spare() -> MicroBatch:
    """A micro-batch that stands for no row of any batch: what a process runs while others have more than it has."""
    a, n = np.zeros(1), np.zeros(1, dtype=np.int64)
    terms = Terms(n, n, n, a, a, a, n, n, n, n, a, a, a, a, a, a)
    return MicroBatch(n, n, n + 1, (1,), terms, np.zeros(0, dtype=np.int64))


def is_cut(batches: Sequence[MicroBatch]) -> bool:
    """Whether a tree is spread over several micro-batches."""
    numbers = [number for batch in batches if len(batch.rows) for number in set(batch.terms.tree.tolist())]
    return len(numbers) != len(set(numbers))


def places_of(trees: Sequence[TokenTree], terms: Terms) -> Ints:
    """Where in its tree each term's token stands itself, not the one that predicts it.

    Below the predicting token stand its continuations, each with another token.
    """
    found = []
    for number, position, token in zip(terms.tree, terms.position, terms.token, strict=True):
        tree = trees[number]
        below = np.arange(position + 1, tree.end[position])
        next_to = below[tree.depth[below] == tree.depth[position] + 1]
        found.append(int(next_to[tree.tokens[next_to] == token][0]))
    return np.array(found, dtype=np.int64)


def pruned(tree: TokenTree, position: Ints) -> tuple[TokenTree, Ints]:
    """The tree with nothing in it but these places and what they see, and where these places are then."""
    wanted = np.unique(position)
    here = np.arange(len(tree))
    places = np.flatnonzero(np.searchsorted(wanted, tree.end) > np.searchsorted(wanted, here))
    part = TokenTree(tree.tokens[places], tree.depth[places], np.searchsorted(places, tree.end[places]))
    return part, np.searchsorted(places, position)


def pack(trees: Sequence[TokenTree], numbers: Sequence[int], terms: Terms) -> MicroBatch:
    """Lay these trees end to end, whole. `numbers` are their indices in `terms.tree`."""
    return _assemble(
        [
            Piece(number, np.arange(len(tree)), tree, np.flatnonzero(terms.tree == number))
            for tree, number in zip(trees, numbers, strict=True)
        ],
        terms,
    )


def _assemble(pieces: Sequence[Piece], terms: Terms, shared: bool = False) -> MicroBatch:
    found = [merged(chosen) for chosen in (_alike(pieces) if shared else [[piece] for piece in pieces])]
    lengths = tuple(len(tree) for tree, _ in found)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    laid = [(piece, at + offset) for (_, homes), offset in zip(found, offsets, strict=True) for piece, at in homes]
    rows = np.concatenate([piece.rows for piece, _ in laid])
    position = [at[np.searchsorted(piece.places, terms.position[piece.rows])] for piece, at in laid]
    return MicroBatch(
        np.concatenate([tree.tokens for tree, _ in found]),
        np.concatenate([tree.depth for tree, _ in found]),
        np.concatenate([tree.end + offset for (tree, _), offset in zip(found, offsets, strict=True)]),
        lengths,
        replace(terms.pick(rows), position=np.concatenate(position).astype(np.int64)),
        rows,
    )


def _stem(tree: TokenTree) -> int:
    """Tokens before the first branching: all that follow are below them."""
    over = np.flatnonzero(tree.end < len(tree))
    return int(over[0]) if len(over) else len(tree)


def _alike(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces, those together whose stems begin alike."""
    found: dict[object, list[Piece]] = {}
    for number, piece in enumerate(pieces):
        begins = piece.tree.tokens[:ALIKE].tobytes() if _stem(piece.tree) >= ALIKE else number
        found.setdefault(begins, []).append(piece)
    return list(found.values())


def merged(pieces: Sequence[Piece]) -> tuple[TokenTree, list[tuple[Piece, Ints]]]:
    """One tree of several whose stems begin like that of the first; and of each, where its tokens are in it.

    Those that share more come first: what a token of the stem is followed by is then its own subtree again.
    """
    first, shares = pieces[0].tree, []
    for piece in pieces[1:]:
        most = min(_stem(first), _stem(piece.tree))
        differ = np.flatnonzero(first.tokens[:most] != piece.tree.tokens[:most])
        shares.append(int(differ[0]) if len(differ) else most)
    tokens, depth, end = [first.tokens], [first.depth], [first.end.copy()]
    homes, total = [(pieces[0], np.arange(len(first)))], len(first)
    for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
        tree, share = pieces[i + 1].tree, shares[i]
        own = np.arange(total - share, total - share + len(tree))
        homes.append((pieces[i + 1], np.where(np.arange(len(tree)) < share, np.arange(len(tree)), own)))
        tokens.append(tree.tokens[share:])
        depth.append(tree.depth[share:])
        end.append(tree.end[share:] + total - share)
        total += len(tree) - share
        end[0][:share] = total
    return TokenTree(np.concatenate(tokens), np.concatenate(depth), np.concatenate(end)), homes
