"""Rows that share the beginning of their context, so that attention reads what they share once and not once a row.

The siblings of a group share their prompt's pages, and often all rows share a system prompt. A bundle is a few rows
with the same first pages. R rows, M bundles of at most B rows.
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


class Bundling:
    """Bundles of the present step: those of the last one, as long as its rows still begin with the same pages."""

    def __init__(self, most: int):
        self.most = most
        self.last: tuple[Bundles, Small] | None = None
        """With as much of the rows' tables as it depends on."""

    def __call__(self, tables: Small, whole_R: NDArray[np.int64]) -> Bundles:
        if self.last is not None:
            found, begin = self.last
            if np.array_equal(tables[:, : begin.shape[1]], begin) and (whole_R >= found.own_R).all():
                return found
        found = bundle(tables, whole_R, self.most)
        self.last = found, tables[:, : max(1, int(found.own_R.max(initial=0)))].copy()
        return found
