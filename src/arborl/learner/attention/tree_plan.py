"""Which blocks of keys each block of queries attends to: the plan of the kernels in `tree_kernels.py`.

It follows from `end`. Each key is followed by its subtree, so the keys of a block are seen by a contiguous run of
queries, from the block's first token to its largest `end`, and all of them up to the smallest. So the plan takes two
comparisons per pair of blocks, on the CPU. A window may leave gaps, so blocks are listed instead of given as ranges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from arborl.types import Ints

PLAN_ROW = 4
"""Numbers per row: the block; where its list of blocks of the other side begins in the plan; where the partially seen
ones begin; where it ends."""


MIN_PROGRAMS = 1056
"""Minimum number of programs for keys, as long as there are heads to divide among them: eight per multiprocessor of a
large GPU."""


class Tile(NamedTuple):
    """Block sizes and launch settings of one kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    forward: Tile
    to_queries: Tile
    to_keys: Tile


TILES_16_BIT = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
    256: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2)),
}
"""For heads of at most this many numbers in 16 bits: the fastest on an H200 in `benchmarks/tree_attention.py --sweep`
(256 was not swept)."""
TILES_32_BIT = {128: Tiles(*[Tile(32, 32, 8, 1)] * 3), 256: Tiles(*[Tile(16, 16, 8, 1)] * 3)}
"""In 32 bits, where products are exact and do not use tensor cores."""


def tiles_for(size: int, dtype: torch.dtype) -> Tiles | None:
    table = {torch.bfloat16: TILES_16_BIT, torch.float16: TILES_16_BIT, torch.float32: TILES_32_BIT}.get(dtype, {})
    return next((tiles for most, tiles in table.items() if size <= most), None)


def shares(work: int, group: int) -> tuple[int, int]:
    """Number of parts into which the query heads of a key head are divided, and heads per part: as few as keep the
    device busy."""
    each = -(-group // min(group, -(-MIN_PROGRAMS // work)))
    return -(-group // each), each


def rows_at(count: int, tiles: Tiles) -> tuple[int, int, int]:
    """Where each kernel's rows begin in a plan for `count` tokens."""
    first = 2 * count
    second = first + PLAN_ROW * -(-count // tiles.forward.queries)
    return first, second, second + PLAN_ROW * -(-count // tiles.to_queries.queries)


def plan(end: Ints, depth: Ints, window: int | None, tiles: Tiles) -> np.ndarray:
    """The plan of a batch in one array: `end`, `depth`, the rows of the three kernels, and the lists that these point
    into."""
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
    """For each block of queries and block of keys, whether it is seen partially, and whether completely."""
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
    """Rows that point into a list, longest first so that the device does not wait for a long one at the end; and the
    list."""
    columns = part.shape[1]
    which, listed = np.nonzero(np.concatenate([whole, part], axis=1))
    stop = np.cumsum(np.bincount(which, minlength=len(part)))
    begin = np.concatenate([[0], stop[:-1]])
    rows = np.stack([np.arange(len(part)), begin, begin + whole.sum(1), stop], axis=1)
    return rows[np.argsort(begin - stop, kind="stable")], listed % columns
