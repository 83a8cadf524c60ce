"""Which blocks of keys each block of queries must look at: what the kernels of `tree_kernels.py` go by.

It follows from `end` alone. The keys of a block are seen by an unbroken run of queries, from its own first token to the
largest `end` in it, since each key is followed by its own subtree; and wholly seen up to the smallest. So it is
two comparisons a pair of blocks, on the CPU. A window takes away what is too deep, which may leave gaps: so blocks are
listed, and not given as runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from arborl.types import Ints

ROW = 4
"""Numbers a row: which block, and where in the plan its list of blocks of the other side begins, where those seen in
part begin in that, and where it stops."""


PROGRAMS = 1056
"""Programs for keys, at least, while there are heads to divide among them: eight for each processor of a large GPU."""


class Tile(NamedTuple):
    """How one kernel cuts its work."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """How all three do."""

    forward: Tile
    to_queries: Tile
    to_keys: Tile


NARROW = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
    256: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2)),
}
"""For heads of at most so many numbers in 16 bits: the quickest on an H200, of those that
`benchmarks/tree_attention.py --sweep` tries (256 is not among them)."""
WIDE = {128: Tiles(*[Tile(32, 32, 8, 1)] * 3), 256: Tiles(*[Tile(16, 16, 8, 1)] * 3)}
"""In 32 bits, where products are exact and take no tensor cores."""


def tiles_for(size: int, dtype: torch.dtype) -> Tiles | None:
    """How to cut for heads of this size; None where the kernels do not apply."""
    table = {torch.bfloat16: NARROW, torch.float16: NARROW, torch.float32: WIDE}.get(dtype, {})
    return next((tiles for most, tiles in table.items() if size <= most), None)


def shares(work: int, group: int) -> tuple[int, int]:
    """Parts that the query heads of a key head are divided into, and heads in each: as few as keep the device busy.

    Args:
        work: programs there are without dividing.
        group: query heads of a key head.
    """
    each = -(-group // min(group, -(-PROGRAMS // work)))
    return -(-group // each), each


def rows_at(count: int, tiles: Tiles) -> tuple[int, int, int]:
    """Where in a plan for `count` tokens each kernel's rows begin."""
    first = 2 * count
    second = first + ROW * -(-count // tiles.forward.queries)
    return first, second, second + ROW * -(-count // tiles.to_queries.queries)


def plan(end: Ints, depth: Ints, window: int | None, tiles: Tiles) -> np.ndarray:
    """All that the kernels need to know of a batch, in one array: `end`, `depth`, the rows of the three kernels, the
    lists that these point into."""
    sides = [
        (*seen(end, depth, window, tiles.forward), False),
        (*seen(end, depth, window, tiles.to_queries), False),
        (*seen(end, depth, window, tiles.to_keys), True),
    ]
    tables = [table(part.T, whole.T) if turned else table(part, whole) for part, whole, turned in sides]
    start = 2 * len(end) + sum(rows.size for rows, _ in tables)
    placed = []
    for rows, listed in tables:
        rows[:, 1:] += start
        start += len(listed)
        placed.append(rows.reshape(-1))
    return np.concatenate([end, depth, *placed, *(listed for _, listed in tables)]).astype(np.int32)


def seen(end: Ints, depth: Ints, window: int | None, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """For each block of queries and block of keys, whether it is seen in part, and whether wholly."""
    queries, keys = np.arange(0, len(end), tile.queries), np.arange(0, len(end), tile.keys)
    first_q, past_q = queries[:, None], queries[:, None] + tile.queries
    some = (keys[None] < past_q) & (first_q < np.maximum.reduceat(end, keys)[None])
    whole = (keys[None] + tile.keys - 1 <= first_q) & (past_q <= np.minimum.reduceat(end, keys)[None])
    if window is not None:
        shallow, deep = np.minimum.reduceat, np.maximum.reduceat
        some &= shallow(depth, queries)[:, None] - deep(depth, keys)[None] < window
        whole &= deep(depth, queries)[:, None] - shallow(depth, keys)[None] < window
    return some & ~whole, some & whole


def table(part: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that point into a list, the longest first: the device then does not wait at the end for one that came last;
    and the list."""
    columns = part.shape[1]
    which, listed = np.nonzero(np.concatenate([whole, part], axis=1))
    stop = np.cumsum(np.bincount(which, minlength=len(part)))
    begin = np.concatenate([[0], stop[:-1]])
    rows = np.stack([np.arange(len(part)), begin, begin + whole.sum(1), stop], axis=1)
    return rows[np.argsort(begin - stop, kind="stable")], listed % columns
