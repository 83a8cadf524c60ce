"""Groups of rows with a shared prefix, whose keys attention reads once per group instead of once per row.

The episodes of a group share the blocks of their prompt, and often all rows share a system prompt. In a step with
prefill each new token is a row, and the tokens of one sequence share all blocks before them. R rows, M groups of at
most B rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Small = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    blocks_M: Small
    """Blocks shared by all rows of a group."""
    rows_MB: Small
    shared_R: Small
    """Blocks at the start of each row that its group covers; 0 for a row without a group."""


def max_groups(rows: int) -> int:
    """Maximum number of groups for so many rows; beyond it the ones that save least are dropped."""
    return max(1, rows // 4)


def group_by_prefix(tables: Small, full_R: NDArray[np.int64], max_rows: int) -> PrefixGroups:
    """Groups of at most `max_rows` rows with the same first blocks. Rows are sorted by their blocks, so neighbours
    share the most. A row joins the group before it unless that would shorten the shared prefix so much that more is
    read twice than before."""
    order = np.argsort(np.ascontiguousarray(tables).view(f"V{tables.shape[1] * 4}")[:, 0])  # by bytes
    ordered, full = tables[order], full_R[order]
    differs = np.column_stack([ordered[1:] != ordered[:-1], np.ones(max(0, len(order) - 1), bool)])
    common = np.minimum(np.argmax(differs, axis=1), np.minimum(full[1:], full[:-1])).tolist()
    if not any(common):
        return PrefixGroups(np.zeros(0, np.int32), np.zeros((0, max_rows), np.int32), np.zeros(len(tables), np.int32))
    groups: list[tuple[int, list[int]]] = []
    for row, shared in zip(order.tolist(), [0, *common], strict=False):
        if groups:
            blocks, rows = groups[-1]
            least = min(blocks, shared) if len(rows) > 1 else shared
            if len(rows) < max_rows and len(rows) * least > (len(rows) - 1) * blocks:
                rows.append(row)
                groups[-1] = (least, rows)
                continue
        groups.append((0, [row]))
    groups = [(blocks, rows) for blocks, rows in groups if len(rows) > 1]
    groups = sorted(groups, key=lambda pair: -pair[0] * (len(pair[1]) - 1))[: max_groups(len(tables))]
    blocks_M = np.array([blocks for blocks, _ in groups], dtype=np.int32)
    rows_MB = np.full((len(groups), max_rows), -1, dtype=np.int32)
    shared_R = np.zeros(len(tables), dtype=np.int32)
    for number, (blocks, rows) in enumerate(groups):
        rows_MB[number, : len(rows)] = rows
        shared_R[rows] = blocks
    return PrefixGroups(blocks_M, rows_MB, shared_R)


def add_prefill_groups(
    decode: PrefixGroups, starts: NDArray[np.int64], counts: NDArray[np.int64], block_size: int, max_rows: int
) -> PrefixGroups:
    """Add sequences with many new tokens behind the rows of `decode`: neighbouring tokens are grouped over the blocks
    that the first of them sees completely; tokens of this step count, because they are stored before attention."""
    ends = len(decode.shared_R) + np.cumsum(counts)
    per_sequence = -(-counts // max_rows)
    sequence = np.repeat(np.arange(len(counts)), per_sequence)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)) * max_rows
    rows_MB = (ends - counts)[sequence, None] + offset[:, None] + np.arange(max_rows)
    rows_MB = np.where(rows_MB < ends[sequence, None], rows_MB, -1)
    blocks_M = np.where((rows_MB >= 0).sum(1) > 1, (starts[sequence] + offset + 1) // block_size, 0)
    blocks_M, rows_MB = np.concatenate([decode.blocks_M, blocks_M]), np.concatenate([decode.rows_MB, rows_MB])
    saved_M = blocks_M * ((rows_MB >= 0).sum(1) - 1)
    best = np.argsort(-saved_M, kind="stable")[: min(max_groups(int(ends[-1])), int((saved_M > 0).sum()))]
    blocks_M, rows_MB = blocks_M[best].astype(np.int32), rows_MB[best].astype(np.int32)
    shared_R = np.zeros(int(ends[-1]), dtype=np.int32)
    used = rows_MB >= 0
    shared_R[rows_MB[used]] = np.repeat(blocks_M, used.sum(1))
    return PrefixGroups(blocks_M, rows_MB, shared_R)


class PrefixGrouping:
    """Groups of the present step; those of the last step are reused while its rows begin with the same blocks."""

    def __init__(self, max_rows: int):
        self.max_rows = max_rows
        self.last: tuple[PrefixGroups, Small] | None = None
        """With the part of the block tables that it depends on."""

    def of_step(
        self, tables: Small, starts: NDArray[np.int64], counts: NDArray[np.int64], block_size: int
    ) -> PrefixGroups:
        """Groups of a step whose sequences add `counts` tokens from `starts` on, those with one token first. Each token
        is a row."""
        single = int((counts == 1).sum())
        groups = self(tables[:single], starts[:single] // block_size)
        if single == len(counts):
            return groups
        return add_prefill_groups(groups, starts[single:], counts[single:], block_size, self.max_rows)

    def __call__(self, tables: Small, full_R: NDArray[np.int64]) -> PrefixGroups:
        if self.last is not None:
            groups, begin = self.last
            if np.array_equal(tables[:, : begin.shape[1]], begin) and (full_R >= groups.shared_R).all():
                return groups
        groups = group_by_prefix(tables, full_R, self.max_rows)
        self.last = groups, tables[:, : max(1, int(groups.shared_R.max(initial=0)))].copy()
        return groups
