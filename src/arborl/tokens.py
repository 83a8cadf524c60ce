"""Token ids that grow: every prompt of a conversation is the beginning of one line of ids, and a length.

A conversation of 80 turns has 80 prompts, each of which begins with the one before it. Written out they would grow with
the square of its length. So ids are kept in a line that is only ever added to, and `Tokens` is a view of its beginning.
Where one is extended from its line's end, or along what is there already, both share the line; else the extended one
gets a line of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
SHOWN = 8
"""Ids that are written out for people; of more, their number is."""
_growing = Lock()


class _Line:
    """Ids that are added to at the end, and never changed. Room is made by moving to a larger array, so that whoever
    looks at the old one goes on seeing what was there."""

    __slots__ = ("ids", "largest", "size")

    def __init__(self, ids: Ids, largest: int):
        self.ids, self.size, self.largest = ids, len(ids), largest

    def extend(self, ids: Ids, largest: int) -> None:
        needed = self.size + len(ids)
        if largest > self.largest:
            self.largest = largest
        if needed > len(self.ids):
            larger = np.empty(needed + needed // 4, dtype=np.int32)
            larger[: self.size] = self.ids[: self.size]
            self.ids = larger
        self.ids[self.size : needed] = ids
        self.size = needed

    def __reduce__(self) -> tuple[Any, ...]:
        return _Line, (self.ids[: self.size], self.largest)


class Tokens(Sequence[int]):
    """Token ids, as a tuple of them would be: equal to it, hashed like it, never changed.

    What begins at the start is shared, however long: `tokens[:n]`, and `tokens + more`. Other slices are tuples.

    Example:
        prompt = Tokens([1, 2, 3])
        longer = prompt + (4, 5)      # costs two ids
        longer[:3] == prompt == (1, 2, 3)

    Args:
        ids: whole numbers from 0 to 2³¹-1. Raises ValueError for others.
    """

    __slots__ = ("_line", "_size")

    def __init__(self, ids: Sequence[int] = ()):
        self._line: _Line = ids._line if isinstance(ids, Tokens) else _Line(*_read(ids))
        self._size = len(ids)

    @classmethod
    def _of(cls, line: _Line, size: int) -> Tokens:
        made = cls.__new__(cls)
        made._line, made._size = line, size
        return made

    @property
    def bound(self) -> int:
        """No id is above it. It may be that of a later token of the line, so it is not always the largest of these."""
        return self._line.largest

    @property
    def array(self) -> Ids:
        """The ids, to be looked at only."""
        seen = self._line.ids[: self._size]
        seen.flags.writeable = False
        return seen

    def __add__(self, more: Sequence[int]) -> Tokens:
        if type(more) not in (tuple, list) and not isinstance(more, Sequence):
            return NotImplemented
        if not self._size:
            return more if isinstance(more, Tokens) else Tokens(more)
        (ids, largest), line = _read(more), self._line
        with _growing:
            if self._size == line.size:
                line.extend(ids, largest)
                return Tokens._of(line, line.size)
            there = line.ids[self._size : min(self._size + len(ids), line.size)]
            if there.tobytes() == ids[: len(there)].tobytes():
                line.extend(ids[len(there) :], largest)
                return Tokens._of(line, self._size + len(ids))
        longer = np.concatenate([line.ids[: self._size], ids])
        return Tokens._of(_Line(longer, max(line.largest, largest)), self._size + len(ids))

    def copy(self) -> Tokens:
        """The same ids on a line of their own."""
        return Tokens._of(_Line(self._line.ids[: self._size].copy(), self._line.largest), self._size)

    @property
    def line(self) -> object:
        """Of two on the same line, the shorter is the beginning of the longer."""
        return self._line

    def common(self, other: Tokens) -> int:
        """How many ids both begin with."""
        size = min(self._size, other._size)
        if self._line is other._line:
            return size
        same = self._line.ids[:size] == other._line.ids[:size]
        return size if same.all() else int(same.argmin())

    def begins(self, other: Tokens) -> bool:
        """Whether `other` begins with these."""
        size = self._size
        if not size or self._line is other._line or size > other._size:
            return size <= other._size
        return bool(self._line.ids[size - 1] == other._line.ids[size - 1]) and self.common(other) == size  # cheap first

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if not isinstance(at, slice):
            return int(self.array[at])
        begin, end, step = at.indices(self._size)
        if begin == 0 and step == 1:
            return Tokens._of(self._line, max(end, 0))
        return tuple(self.array[at].tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            return self._size == other._size == self.common(other)
        return len(other) == self._size and tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Tokens | tuple):
            return NotImplemented
        other = Tokens(other)
        at = self.common(other)
        return self._size < other._size if at in (self._size, other._size) else self[at] < other[at]

    def __gt__(self, other: object) -> bool:
        return Tokens(other) < self if isinstance(other, Tokens | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        ids = ", ".join(map(str, self[:SHOWN]))
        return f"Tokens([{ids}])" if self._size <= SHOWN else f"Tokens([{ids}, …], {self._size} of them)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens._of, (self._line, self._size)  # those of one line are sent with it once


def _read(ids: Sequence[int]) -> tuple[Ids, int]:
    """The ids as an array, and a number that none is above."""
    if isinstance(ids, Tokens):
        return ids.array, ids.bound
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
        largest = int(ids.astype(np.uint64, copy=False).max(initial=0)) if len(ids) else -1
        if largest < 2**31:  # a negative one becomes very large
            return ids.astype(np.int32), largest
    try:
        found = array("I", ids)  # refuses all but whole numbers from 0 on
        largest = max(found, default=-1)
        if largest < 2**31 and bool not in map(type, ids):
            return np.frombuffer(found, dtype=np.int32), largest
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"token ids are whole numbers from 0 to 2**31-1, in a flat list; these are {str(ids)[:80]}")
