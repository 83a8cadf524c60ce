"""In which order rows come: a new one every pass, or their own; and every row once before any comes again.

Rows that are read in blocks (a Parquet file's row groups) cannot be drawn from anywhere at will: each draw would decode
a block. So the order of the blocks is shuffled, and rows are shuffled within windows of neighbouring blocks of that
order. A pass is still a permutation of all rows; two rows of one block come within one window of each other. What is
kept is the order of the blocks and one window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from arborl.seeds import generator
from arborl.types import Ints

WINDOW = 65_536
"""Rows that are shuffled among each other."""
TINY = 16
"""Below so many rows two passes could be alike by chance."""


class View(Protocol):
    """Some of a table's rows."""

    sizes: Ints
    """How many of them are in each block."""
    runs: Ints
    """Blocks that lie behind each other and are cheap to read in that order only: how many are in each such run."""

    def of(self, block: int) -> Ints:
        """The numbers of those in a block."""
        ...


def permutation(size: int, seed: int, number: int) -> Ints:
    """The order of a pass. Of a few rows, each leads in turn, so that no two passes in a row are alike."""
    order: Ints = generator(seed, "pass", number).permutation(size)
    if 1 < size < TINY:
        lead = generator(seed, "lead").permutation(size)[number % size]
        order = np.concatenate([[lead], order[order != lead]])
    return order


class RowOrder:
    """The endless stream of a view's rows.

    Example:
        Order(view, seed=7).numbers(start=1_000, count=16)      # rows 1,000 to 1,015 of the stream
    """

    def __init__(self, view: View, seed: int, window: int = WINDOW, shuffle: bool = True):
        self.view, self.seed, self.window, self.shuffle = view, seed, window, shuffle
        self.size = int(view.sizes.sum())
        self._pass: tuple[int, list[Ints], Ints] | None = None
        self._rows: tuple[int, int, Ints] | None = None

    def numbers(self, start: int, count: int) -> Ints:
        """The rows at these places of the stream."""
        parts: list[Ints] = []
        while count > 0:
            number, at = divmod(start, self.size)
            windows, ends = self._windows(number)
            index = int(np.searchsorted(ends, at, side="right"))
            rows = self._window(number, index, windows[index])
            begin = at - (int(ends[index - 1]) if index else 0)
            part = rows[begin : begin + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _windows(self, number: int) -> tuple[list[Ints], Ints]:
        """The blocks of each window of a pass, and where each window ends."""
        if self._pass is None or self._pass[0] != number:  # only a cache: a pass follows from its number
            order = self._blocks(number)
            sizes = self.view.sizes[order]
            cuts = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // self.window)) + 1
            ends = np.cumsum([part.sum() for part in np.split(sizes, cuts)])
            self._pass = number, np.split(order, cuts), ends
        return self._pass[1], self._pass[2]

    def _blocks(self, number: int) -> Ints:
        """The blocks with rows, their runs shuffled."""
        if not self.shuffle:
            return np.flatnonzero(self.view.sizes > 0)
        runs = self.view.runs
        first = np.cumsum(runs) - runs
        shuffled = permutation(len(runs), self.seed, number) if len(runs) > 1 else np.zeros(1, np.int64)
        order = np.concatenate([np.arange(first[run], first[run] + runs[run]) for run in shuffled])
        return order[self.view.sizes[order] > 0]

    def _window(self, number: int, index: int, blocks: Iterable[int]) -> Ints:
        if self._rows is None or self._rows[:2] != (number, index):
            rows = np.concatenate([self.view.of(int(block)) for block in blocks])
            seed = self.seed if len(rows) == self.size else generator(self.seed, "window", index).integers(2**62)
            self._rows = number, index, rows[permutation(len(rows), int(seed), number)] if self.shuffle else rows
        return self._rows[2]
