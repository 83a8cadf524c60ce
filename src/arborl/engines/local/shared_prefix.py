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
    common = np.minimum(np.argmax(differs, axis=1), np.minimum(full[1:], full[:-1]))
    found = np.array(_joined_runs(common, max_rows), dtype=np.int64).reshape(-1, 3)
    best = np.argsort(-found[:, 2] * (found[:, 1] - 1), kind="stable")[: max_groups(len(tables))]
    first, count, blocks = found[best].T
    columns = np.arange(max_rows)
    used = columns < count[:, None]
    rows_MB = np.where(used, order[np.where(used, first[:, None] + columns, 0)], -1) if len(best) else used
    shared_R = np.zeros(len(tables), dtype=np.int32)
    shared_R[rows_MB[used]] = np.repeat(blocks, count)
    return PrefixGroups(blocks.astype(np.int32), rows_MB.astype(np.int32), shared_R)


def _joined_runs(common: NDArray[np.int64], max_rows: int) -> list[tuple[int, int, int]]:
    """Groups of neighbouring rows as (first row, number of rows, shared blocks), where row i + 1 shares `common[i]`
    blocks with row i. The loop is over runs of equal numbers, of which there are far fewer than rows."""
    ends = np.append(np.flatnonzero(np.diff(common)) + 1, len(common)) if len(common) else np.zeros(0, np.int64)
    groups: list[tuple[int, int, int]] = []
    first, count, blocks = 0, 1, 0  # the open group
    row = 1
    for end, shared in zip(ends.tolist(), common[ends - 1].tolist(), strict=True):
        while row <= end:
            least = min(blocks, shared) if count > 1 else shared
            if count < max_rows and count * least > (count - 1) * blocks:
                joined = min(max_rows - count, end + 1 - row)
                count, blocks, row = count + joined, least, row + joined
                continue
            if count > 1:
                groups.append((first, count, blocks))
            row = row + 1 if shared else end + 1
            first, count, blocks = row - 1, 1, 0
    return [*groups, (first, count, blocks)] if count > 1 else groups


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
