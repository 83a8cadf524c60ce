"""Rows that share the beginning of their context, so that attention reads what they share once and not once a row.

The siblings of a group share their prompt's pages, and often all rows share a system prompt. In a step that also reads,
each new token is a row, and the tokens of one sequence share all that came before them. A bundle is a few rows with the
same first pages. R rows, M bundles of at most B rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Small = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Bundles:
    """Which rows share how much."""

    pages_M: Small
    """Pages that all rows of a bundle begin with."""
    rows_MB: Small
    """The rows of each bundle; -1 where it has fewer."""
    own_R: Small
    """Pages at the beginning of each row that its bundle looks at for it; 0 for a row in none."""


def room_for(rows: int) -> int:
    """Bundles of so many rows that are made at most; where groups are small, the ones that save least are left out."""
    return max(1, rows // 4)


def bundle(tables: Small, whole_R: NDArray[np.int64], most: int) -> Bundles:
    """Rows with the same first pages, in bundles of at most `most`.

    Neighbours in the order of their pages share the most. A row joins the bundle before it unless that would shorten
    what is shared so much that more would be read twice than before.

    Args:
        tables: `[R, pages]`, the pages of each row.
        whole_R: how many of them hold nothing but tokens that were read before this step; only those are shared.
    """
    order = np.argsort(np.ascontiguousarray(tables).view(f"V{tables.shape[1] * 4}")[:, 0])  # byte by byte
    ordered, whole = tables[order], whole_R[order]
    differs = np.column_stack([ordered[1:] != ordered[:-1], np.ones(max(0, len(order) - 1), bool)])
    common = np.minimum(np.argmax(differs, axis=1), np.minimum(whole[1:], whole[:-1])).tolist()
    if not any(common):
        return Bundles(np.zeros(0, np.int32), np.zeros((0, most), np.int32), np.zeros(len(tables), np.int32))
    found: list[tuple[int, list[int]]] = []
    for row, shared in zip(order.tolist(), [0, *common], strict=False):
        if found:
            pages, rows = found[-1]
            least = min(pages, shared) if len(rows) > 1 else shared
            if len(rows) < most and len(rows) * least > (len(rows) - 1) * pages:
                rows.append(row)
                found[-1] = (least, rows)
                continue
        found.append((0, [row]))
    found = [(pages, rows) for pages, rows in found if len(rows) > 1]
    found = sorted(found, key=lambda pair: -pair[0] * (len(pair[1]) - 1))[: room_for(len(tables))]
    pages_M = np.array([pages for pages, _ in found], dtype=np.int32)
    rows_MB = np.full((len(found), most), -1, dtype=np.int32)
    own_R = np.zeros(len(tables), dtype=np.int32)
    for number, (pages, rows) in enumerate(found):
        rows_MB[number, : len(rows)] = rows
        own_R[rows] = pages
    return Bundles(pages_M, rows_MB, own_R)


def with_reads(ones: Bundles, starts: NDArray[np.int64], counts: NDArray[np.int64], size: int, most: int) -> Bundles:
    """After the rows in `ones` come sequences that bring many tokens: neighbours among these are bundled over the pages
    that the first of them sees the whole of; tokens of this very step count, being stored before anybody looks."""
    ends = len(ones.own_R) + np.cumsum(counts)
    bundles = -(-counts // most)
    of = np.repeat(np.arange(len(counts)), bundles)
    offset = (np.arange(len(of)) - np.repeat(np.cumsum(bundles) - bundles, bundles)) * most
    rows_MB = (ends - counts)[of, None] + offset[:, None] + np.arange(most)
    rows_MB = np.where(rows_MB < ends[of, None], rows_MB, -1)
    pages_M = np.where((rows_MB >= 0).sum(1) > 1, (starts[of] + offset + 1) // size, 0)
    pages_M, rows_MB = np.concatenate([ones.pages_M, pages_M]), np.concatenate([ones.rows_MB, rows_MB])
    saved_M = pages_M * ((rows_MB >= 0).sum(1) - 1)
    best = np.argsort(-saved_M, kind="stable")[: min(room_for(int(ends[-1])), int((saved_M > 0).sum()))]
    pages_M, rows_MB = pages_M[best].astype(np.int32), rows_MB[best].astype(np.int32)
    own_R = np.zeros(int(ends[-1]), dtype=np.int32)
    inside = rows_MB >= 0
    own_R[rows_MB[inside]] = np.repeat(pages_M, inside.sum(1))
    return Bundles(pages_M, rows_MB, own_R)


class Bundling:
    """Bundles of the present step: those of the last one, as long as its rows still begin with the same pages."""

    def __init__(self, most: int):
        self.most = most
        self.last: tuple[Bundles, Small] | None = None
        """With as much of the rows' tables as it depends on."""

    def of_step(self, tables: Small, starts: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> Bundles:
        """Of a step whose sequences, those that bring one token first, bring `counts` tokens from `starts` on, each of
        which is a row. Pages have `size` tokens."""
        ones = int((counts == 1).sum())
        found = self(tables[:ones], starts[:ones] // size)
        return found if ones == len(counts) else with_reads(found, starts[ones:], counts[ones:], size, self.most)

    def __call__(self, tables: Small, whole_R: NDArray[np.int64]) -> Bundles:
        if self.last is not None:
            found, begin = self.last
            if np.array_equal(tables[:, : begin.shape[1]], begin) and (whole_R >= found.own_R).all():
                return found
        found = bundle(tables, whole_R, self.most)
        self.last = found, tables[:, : max(1, int(found.own_R.max(initial=0)))].copy()
        return found
