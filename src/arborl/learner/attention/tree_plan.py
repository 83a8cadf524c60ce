"""Which blocks of keys each block of queries attends to: the plan of the kernels in `tree_kernels.py`.

It follows from `end`. Each key is followed by its subtree, so the keys of a block are seen by a contiguous run of
queries, from the block's first token to its largest `end`, and all of them up to the smallest. The CPU computes the
plan in time linear in the number of such pairs of blocks. A window may leave gaps, so blocks are listed instead of
given as ranges.

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

KEY_PROGRAMS = 528
"""No program for keys does more than one part in so many of the work of all heads, or one pair of blocks: four programs
per multiprocessor of a large GPU."""


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
    pairs = [visible_pairs(end, depth, window, tile) for tile in tiles]
    by_queries = [table(one.query, one.key, one.whole) for one in pairs[:2]]
    rows, listed = table(pairs[2].key, pairs[2].query, pairs[2].whole)
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


class BlockPairs(NamedTuple):
    """Blocks of keys and of queries of which some pair of tokens is visible, and whether all pairs are."""

    key: Ints
    query: Ints
    whole: np.ndarray


def visible_pairs(end: Ints, depth: Ints, window: int | None, tile: Tile) -> BlockPairs:
    """In the order of keys, then queries."""
    keys = np.arange(0, len(end), tile.keys)
    first = keys // tile.queries
    count = -(-np.maximum.reduceat(end, keys) // tile.queries) - first
    key = np.repeat(np.arange(len(keys)), count)
    query = np.arange(len(key)) - np.repeat(np.cumsum(count) - count - first, count)
    begin, past = query * tile.queries, (query + 1) * tile.queries
    whole = ((key + 1) * tile.keys - 1 <= begin) & (past <= np.minimum.reduceat(end, keys)[key])
    if window is not None:
        queries = np.arange(0, len(end), tile.queries)
        shallow, deep = np.minimum.reduceat, np.maximum.reduceat
        whole &= deep(depth, queries)[query] - shallow(depth, keys)[key] < window
        some = shallow(depth, queries)[query] - deep(depth, keys)[key] < window
        key, query, whole = key[some], query[some], whole[some]
    return BlockPairs(key, query, whole)


def table(block: Ints, other: Ints, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows, one per block, that point into a list, longest first so that the device does not wait for a long one at the
    end; and the list: the blocks of the other side, completely visible ones first."""
    order = np.concatenate([np.flatnonzero(whole), np.flatnonzero(~whole)])
    count = np.bincount(block)
    kind = np.uint16 if len(count) < 2**16 else np.int64  # numpy sorts 16 bits in linear time
    order = order[np.argsort(block[order].astype(kind), kind="stable")]
    stop = np.cumsum(count)
    begin = stop - count
    middle = begin + np.bincount(block[whole], minlength=len(count))
    return longest_first(np.stack([np.arange(len(count)), begin, middle, stop], axis=1)), other[order]


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
