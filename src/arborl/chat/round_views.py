"""What a round of a template's loop sees: messages, namespaces and the loop itself, each noting what is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2.utils import Namespace

if TYPE_CHECKING:
    from arborl.chat.rounds import Render

SCALARS = (str, int, float, bool, type(None))
NEVER = 1 << 60
"""Further than any conversation goes: a round that looked so far is not kept."""
MISSING = object()


class Unfit(Exception):
    """The template does something that is not followed here."""


class Messages(Sequence[Any]):
    """The messages from one of them on, noting which are looked at."""

    def __init__(self, render: Render, items: list[Any], begin: int):
        self._render, self._items, self.begin = render, items, begin

    @property
    def rest(self) -> list[Any]:
        """The messages, for a loop that goes through them."""
        return self._items[self.begin :]

    def _all(self) -> list[Any]:
        self._render.looked_at(NEVER)
        return self.rest

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            begin = at.start or 0
            if at.stop is None and at.step in (None, 1) and isinstance(begin, int) and begin >= 0:
                return Messages(self._render, self._items, self.begin + begin)
            return self._all()[at]
        if not isinstance(at, int) or not 0 <= at < len(self._items) - self.begin:
            return self._all()[at]
        self._render.looked_at(self.begin + at)
        return self._items[self.begin + at]

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        some = len(self._items) > self.begin
        self._render.looked_at(self.begin if some else NEVER)
        return some

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Messages) else other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> list[Any]:
        return self._all() + list(other)

    def __radd__(self, other: Any) -> list[Any]:
        return list(other) + self._all()

    def __repr__(self) -> str:
        return repr(self._all())


class Space(Namespace):
    """A namespace from outside the loop, noting what a round reads of it and writes to it."""

    def __init__(self, render: Render, number: int, *args: Any, **values: Any):
        object.__setattr__(self, "_noted", (render, number))
        super().__init__(*args, **values)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        render, number = object.__getattribute__(self, "_noted")
        value = values_of(self).get(name, MISSING)
        round = render.round
        if round is not None and not any(known[:2] == (number, name) for known in (*round.written, *round.read)):
            round.read.append((number, name, value))
        if value is MISSING:
            raise AttributeError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        render, number = object.__getattribute__(self, "_noted")
        if render.round is not None:
            if not isinstance(value, SCALARS):
                raise Unfit("what is written may change later")
            render.round.written.append((number, name, value))
        super().__setitem__(name, value)


def values_of(space: Space) -> dict[str, Any]:
    return object.__getattribute__(space, "_Namespace__attrs")  # type: ignore[no-any-return]


def number_of(space: Space) -> int:
    return object.__getattribute__(space, "_noted")[1]  # type: ignore[no-any-return]


class Loop:
    """What a template's `loop` is, noting whether a round asks for what lies ahead."""

    depth, depth0 = 1, 0

    def __init__(self, render: Render, items: Sequence[Any], index: int):
        self._render, self._items, self._at, self.first = render, items, index, index == 0

    @property
    def index0(self) -> int:
        self._render.placed()
        return self._at

    @property
    def index(self) -> int:
        return self.index0 + 1

    @property
    def content(self) -> Any:
        """Of the item, for what does more with it than write it."""
        self._render.placed()
        return self._render.content_of(self._items[self._at])

    def _ahead(self) -> int:
        """Rounds to come, which will be more."""
        self._render.looked_at(NEVER)
        return len(self._items) - self.index

    @property
    def last(self) -> bool:
        return self.index == len(self._items) and not self._ahead()  # one that is not the last will never be

    @property
    def length(self) -> int:
        return self._ahead() + self.index

    @property
    def revindex(self) -> int:
        return self._ahead() + 1

    @property
    def revindex0(self) -> int:
        return self._ahead()

    @property
    def previtem(self) -> Any:
        return self._items[self.index0 - 1] if self.index0 else self._render.undefined("there is no previous item")

    @property
    def nextitem(self) -> Any:
        if self.last:
            return self._render.undefined("there is no next item")
        assert self._render.round is not None
        self._render.round.following = self._items[self.index]
        return self._items[self.index]

    def cycle(self, *values: Any) -> Any:
        if not values:
            raise TypeError("no items for cycling given")
        return values[self.index0 % len(values)]

    def _unfit(self, *args: Any) -> NoReturn:
        raise Unfit("the loop itself is looked at, or remembers")

    changed: Callable[..., NoReturn] = _unfit
    __call__ = __str__ = __repr__ = __len__ = __iter__ = _unfit
