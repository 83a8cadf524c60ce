"""Which blocks of keys each block of queries attends to: the plan of the kernels in `tree_kernels.py`.

It follows from `end`. Each key is followed by its subtree, so the keys of a block are seen by a contiguous run of
queries, from the block's first token to its largest `end`, and all of them up to the smallest. So the plan takes two
comparisons per pair of blocks, on the CPU. A window may leave gaps, so blocks are listed instead of given as ranges.

Keys of a prompt that many trees share are seen by nearly all queries of a batch, keys of an answer by a few. So the
list of a block of keys is divided among several programs if it is long; each writes its sum to a slot of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from arborl.types import Ints

PLAN_ROW = 4
"""Numbers per row for queries: the block; where its list of blocks of keys begins in the plan; where the partially seen
ones begin; where it ends."""
KEY_ROW = 5
"""Numbers per row for keys: those of `PLAN_ROW`, and the slot for its sum, or -1 if it has the block's whole list."""
SUM_ROW = 3
"""Numbers per block of keys with several rows: the block, its first slot, and the one after its last."""

KEY_PROGRAMS = 1056
"""Number of programs among which the work for keys is divided evenly: eight per multiprocessor of a large GPU."""


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


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The plan of a batch. `numbers`: `end` and `depth` of each token, the rows of the three kernels, the rows of the
    sums, and the lists that rows point into."""

    numbers: np.ndarray
    key_rows: int
    sum_rows: int
    slots: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.key_rows, self.sum_rows, self.slots


def rows_at(count: int, tiles: Tiles, key_rows: int) -> tuple[int, int, int, int]:
    """Where each kernel's rows begin in a plan for `count` tokens, and where the rows of the sums do."""
    first = 2 * count
    second = first + PLAN_ROW * -(-count // tiles.forward.queries)
    third = second + PLAN_ROW * -(-count // tiles.to_queries.queries)
    return first, second, third, third + KEY_ROW * key_rows


def plan(end: Ints, depth: Ints, window: int | None, tiles: Tiles, key_heads: int) -> BlockPlan:
    by_queries = [table(*seen(end, depth, window, tile)) for tile in (tiles.forward, tiles.to_queries)]
    part, whole = seen(end, depth, window, tiles.to_keys)
    rows, listed = table(part.T, whole.T)
    key_rows, sums, slots = divide(rows, -(-len(listed) * key_heads // KEY_PROGRAMS))
    tables = [*by_queries, (key_rows, listed)]
    start = 2 * len(end) + sums.size + sum(rows.size for rows, _ in tables)
    placed = []
    for rows, listed in tables:
        rows[:, 1:PLAN_ROW] += start
        start += len(listed)
        placed.append(rows.reshape(-1))
    numbers = np.concatenate([end, depth, *placed, sums.reshape(-1), *(listed for _, listed in tables)])
    return BlockPlan(numbers.astype(np.int32), len(key_rows), len(sums), slots)


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
    return longest_first(rows), listed % columns


def longest_first(rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(rows[:, 1] - rows[:, 3], kind="stable")]


def divide(rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows for keys with at most `most` listed blocks each, rows of the sums, and the number of slots."""
    block, begin, middle, stop = rows.T
    count = -(-(stop - begin) // most)
    which = np.repeat(np.arange(len(rows)), count)
    part = np.arange(len(which)) - (np.cumsum(count) - count)[which]
    length = (stop - begin)[which]
    first, past = (begin[which] + length * at // count[which] for at in (part, part + 1))
    divided = count[which] > 1
    slot = np.where(divided, np.cumsum(divided) - 1, -1)
    key_rows = np.stack([block[which], first, middle[which].clip(first, past), past, slot], axis=1)
    slots = np.cumsum(np.where(count > 1, count, 0))
    sums = np.stack([block, slots - count, slots], axis=1)[count > 1]
    return longest_first(key_rows), sums, int(divided.sum())
