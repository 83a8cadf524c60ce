"""Immutable sequences of token ids that share memory with their extensions.

A conversation of 80 turns has 80 prompts, each a prefix of the next; copies would take quadratic memory. Ids are stored
in an append-only buffer, and `Tokens` is a view of its beginning. An extension at the end of the buffer, or along ids
that are already there, shares the buffer; any other extension gets a new one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
MAX_REPR = 8
"""Number of ids in `repr`."""
_growing = Lock()


class _TokenBuffer:
    """Append-only ids. Growing copies them to a larger array, so that views of the old one stay valid."""

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
        return _TokenBuffer, (self.ids[: self.size], self.largest)


class Tokens(Sequence[int]):
    """Token ids (0 to 2³¹-1) that behave like a tuple: equal to it, with the same hash, immutable.

    `tokens[:n]` and `tokens + more` share memory. Other slices are tuples.
    """

    __slots__ = ("_line", "_size")

    def __init__(self, ids: Sequence[int] = ()):
        self._line: _TokenBuffer = ids._line if isinstance(ids, Tokens) else _TokenBuffer(*_read(ids))
        self._size = len(ids)

    @classmethod
    def _of(cls, line: _TokenBuffer, size: int) -> Tokens:
        made = cls.__new__(cls)
        made._line, made._size = line, size
        return made

    @property
    def bound(self) -> int:
        """Upper bound of the ids; it may be that of a later token of the buffer."""
        return self._line.largest

    @property
    def array(self) -> Ids:
        """The ids as a read-only array."""
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
        return Tokens._of(_TokenBuffer(longer, max(line.largest, largest)), self._size + len(ids))

    def copy(self) -> Tokens:
        """A copy in a new buffer."""
        return Tokens._of(_TokenBuffer(self._line.ids[: self._size].copy(), self._line.largest), self._size)

    @property
    def line(self) -> object:
        """The buffer: of two `Tokens` with the same one, the shorter is a prefix of the longer."""
        return self._line

    def common(self, other: Tokens) -> int:
        """Length of the common prefix."""
        size = min(self._size, other._size)
        if self._line is other._line:
            return size
        same = self._line.ids[:size] == other._line.ids[:size]
        return size if same.all() else int(same.argmin())

    def begins(self, other: Tokens) -> bool:
        """Whether these ids are a prefix of `other`."""
        size = self._size
        if not size or self._line is other._line or size > other._size:
            return size <= other._size
        return (
            bool(self._line.ids[size - 1] == other._line.ids[size - 1]) and self.common(other) == size
        )  # cheap check first

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
        ids = ", ".join(map(str, self[:MAX_REPR]))
        return f"Tokens([{ids}])" if self._size <= MAX_REPR else f"Tokens([{ids}, …], {self._size} of them)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens._of, (self._line, self._size)  # the buffer is pickled once for all its views


def _read(ids: Sequence[int]) -> tuple[Ids, int]:
    """The ids as an array, and an upper bound of them."""
    if isinstance(ids, Tokens):
        return ids.array, ids.bound
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
        largest = int(ids.astype(np.uint64, copy=False).max(initial=0)) if len(ids) else -1
        if largest < 2**31:  # negative ids become very large
            return ids.astype(np.int32), largest
    try:
        found = array("I", ids)  # accepts whole numbers >= 0 only
        largest = max(found, default=-1)
        if largest < 2**31 and bool not in map(type, ids):
            return np.frombuffer(found, dtype=np.int32), largest
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"token ids are whole numbers from 0 to 2**31-1, in a flat list; these are {str(ids)[:80]}")
