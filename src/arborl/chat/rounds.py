"""A template's loops, round by round: what each wrote, and what it looked at besides its own item.

What a round can see is: names from outside the loop (compared as a whole), a namespace (each value it read, and what it
wrote), other messages (the furthest it looked at), and the loop itself (whether it asked for what lies ahead). Where
all of that is as it was, so is what it writes, and it need not be gone through again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from arborl.chat.control import DIVIDER, Joined, Rendered, undivided
from arborl.chat.render_deadline import DEADLINE

ROUNDS, LOOP = "arbor_rounds", "arbor_loop"
"""Names that a template is given for its loops; none of its own."""
OWN_TEXT = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
"""What a template that consists of others has."""
SCALARS = (str, int, float, bool, type(None))
NEVER = 1 << 60
"""Further than any conversation goes: a round that looked so far is not kept."""
ANYTHING, MISSING = object(), object()
EMPTY = Rendered("")


class Unfit(Exception):
    """The template does something that is not followed here."""


# ------------------------------------------------------------------------------------------------ the template


def with_rounds(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template | None:
    """The same template, which asks for the rounds of its loops; None where it has none that can be told apart."""
    tree = environment.parse(source)
    loops = [] if any(tree.find_all(OWN_TEXT)) else list(_loops(tree.body))
    macros = nodes.Template(list(tree.find_all(nodes.Macro))).set_environment(environment)
    outside = meta.find_undeclared_variables(macros)  # type: ignore[arg-type]
    for number, loop in enumerate(loops):
        alone = nodes.For(loop.target, nodes.List([]), loop.body, [], None, False)
        inside = meta.find_undeclared_variables(nodes.Template([alone]).set_environment(environment))  # type: ignore[arg-type]
        names = sorted({*inside, *outside} - {"namespace"})
        seen = nodes.Dict([nodes.Pair(nodes.Const(name), nodes.Name(name, "load")) for name in names])
        for name in list(_meaning_this(loop.body)):
            name.name = LOOP
        loop.target = nodes.Tuple([loop.target, nodes.Name(LOOP, "store")], "store")
        loop.iter = nodes.Call(nodes.Name(ROUNDS, "load"), [nodes.Const(number), loop.iter, seen], [], None, None)
    tree.set_lineno(1).set_environment(environment)
    return environment.from_string(tree) if loops else None  # type: ignore[arg-type]


def _loops(body: Iterable[nodes.Node]) -> Iterator[nodes.For]:
    """Loops that write straight into the template's text."""
    for node in body:
        if isinstance(node, nodes.If):
            yield from _loops([*node.body, *node.elif_, *node.else_])
        elif isinstance(node, nodes.For) and node.test is None and not node.recursive:
            yield from [node] if node.find(nodes.Output) is not None and node.find(nodes.Macro) is None else []


def _meaning_this(body: Iterable[nodes.Node]) -> Iterator[nodes.Name]:
    """Where `loop` is that of this body, and not of one within it."""
    for node in body:
        if isinstance(node, nodes.Name) and node.name == "loop":
            yield node
        elif isinstance(node, nodes.For):
            yield from _meaning_this([node.iter, *node.else_])
        else:
            yield from _meaning_this(node.iter_child_nodes())


# ------------------------------------------------------------------------------------------------ what is kept


@dataclass(slots=True)
class Round:
    """A loop's way with one item."""

    item: Any
    text: Rendered = EMPTY
    following: Any = ANYTHING
    """The item behind it, where it looked at that."""
    furthest: int = -1
    """The last of the messages that it looked at."""
    read: list[tuple[int, str, Any]] = field(default_factory=list)
    """Of namespaces, by number: names and values."""
    written: list[tuple[int, str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Rounds:
    """Those of one loop, and what was seen from all of them."""

    names: Mapping[str, Any] = field(default_factory=dict)
    before: Rendered = EMPTY
    """The text in front of the loop."""
    rounds: list[Round] = field(default_factory=list)


Kept = dict[int, Rounds]
"""Of a whole render, by the number of the loop."""


# ------------------------------------------------------------------------------------------------ one render


class Render:
    """Goes through a template once, passing over what is kept.

    Args:
        template: as `with_rounds` made it.
        known: what it is given, but for the messages.
        messages: as templates read them.
        kept: of an earlier render.
        common: messages at the beginning that are those of that render.
    """

    def __init__(
        self, template: jinja2.Template, known: Mapping[str, Any], messages: list[Any], kept: Kept, common: int
    ):
        self.template, self.known, self.messages, self.earlier = template, known, messages, kept
        self.common = common
        self.kept: Kept = {}
        self.spaces: list[Space] = []
        self.round: Round | None = None
        """The one on its way; what is looked at outside of rounds is looked at anew each time."""
        self._written: list[str] = []
        self._parts: list[Rendered] = []

    def text(self) -> Joined:
        """Raises Unfit, or whatever a template raises that meets what it does not expect."""
        own = {"messages": Messages(self, self.messages, 0), "namespace": self._namespace, ROUNDS: self._rounds}
        context = self.template.new_context({**self.known, **own}, shared=True)
        write = self._written.append
        mark = DEADLINE.begin()
        try:
            for text in self.template.root_render_func(context):  # one by one: rounds are cut while it goes on
                write(text)
        finally:
            DEADLINE.end(mark)
        self._parts.append(self._cut())
        return Joined(self._parts)

    def _cut(self) -> Rendered:
        """What has been written since the last cut."""
        text = "".join(self._written)
        self._written.clear()
        if text.startswith(DIVIDER):
            raise Unfit("a divider that belongs to what is before it")
        return undivided(text)

    def _rounds(self, number: int, items: Iterable[Any], names: Mapping[str, Any]) -> Iterator[tuple[Any, Loop]]:
        if number in self.kept:
            raise Unfit("a loop within a loop")
        self.round = None
        items, before = list(items), self._cut()
        earlier = self.earlier.get(number, Rounds())
        self._parts.append(earlier.before if earlier.before == before else before)  # the very same, to be found again
        count = self._unchanged(earlier, items, names)
        rounds = earlier.rounds[:count]
        self.kept[number] = Rounds(names, self._parts[-1], rounds)
        self._parts.extend([round.text for round in rounds])
        for index in range(count, len(items)):
            self.round = round = Round(items[index])
            yield items[index], Loop(self, items, index)
            text, past = self._cut(), earlier.rounds[index].text if index < len(earlier.rounds) else None
            round.text = past if past is not None and past == text else text
            self._parts.append(round.text)
            rounds.append(round)
        self.round = None

    def _unchanged(self, earlier: Rounds, items: Sequence[Any], names: Mapping[str, Any]) -> int:
        """Rounds that would go as they went; what they wrote is written. The last item's is always gone through."""
        if earlier.names.keys() != names.keys() or not all(_same(names[name], earlier.names[name]) for name in names):
            return 0
        count = 0
        for index, round in enumerate(earlier.rounds[: max(len(items) - 1, 0)]):
            if round.furthest >= self.common or not _same_item(round.item, items[index]):
                break
            if round.following is not ANYTHING and not _same_item(round.following, items[index + 1]):
                break
            if round.read and not self._reads_the_same(round):
                break
            for space, name, value in round.written:
                self.spaces[space][name] = value
            count += 1
        return count

    def _reads_the_same(self, round: Round) -> bool:
        return all(
            space < len(self.spaces) and _same(value, values_of(self.spaces[space]).get(name, MISSING))
            for space, name, value in round.read
        )

    def _namespace(self, *args: Any, **values: Any) -> Namespace:
        if self.round is not None:
            return Namespace(*args, **values)  # goes with its round
        self.spaces.append(Space(self, len(self.spaces), *args, **values))
        return self.spaces[-1]

    def looked_at(self, index: int) -> None:
        """Of the messages."""
        if self.round is not None and index > self.round.furthest:
            self.round.furthest = index

    def undefined(self, why: str) -> jinja2.Undefined:
        return self.template.environment.undefined(why)


def _same(one: Any, other: Any) -> bool:
    """Whether a round that saw one would have done the same with the other."""
    if one is other:
        return True
    if isinstance(one, Messages) and isinstance(other, Messages):
        return one._begin == other._begin  # which of them were looked at is noted
    if isinstance(one, Space) and isinstance(other, Space):
        return number_of(one) == number_of(other)
    if isinstance(one, jinja2.Undefined | Macro):
        return type(one) is type(other)  # what macros see is seen from the rounds
    return type(one) is type(other) and isinstance(one, SCALARS) and bool(one == other)


def _same_item(one: Any, other: Any) -> bool:
    """Templates may rewrite a message, and then it is another object each time."""
    if one is other:
        return True
    texts = isinstance(one, dict) and all(type(value) is str for value in one.values())
    return texts and type(other) is dict and one == other


# ------------------------------------------------------------------------------------------------ what a round sees


class Messages(Sequence[Any]):
    """The messages from one of them on, noting which are looked at."""

    def __init__(self, render: Render, items: list[Any], begin: int):
        self._render, self._items, self._begin = render, items, begin

    def _all(self) -> list[Any]:
        self._render.looked_at(NEVER)
        return self._items[self._begin :]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            begin = at.start or 0
            if at.stop is None and at.step in (None, 1) and isinstance(begin, int) and begin >= 0:
                return Messages(self._render, self._items, self._begin + begin)
            return self._all()[at]
        if not isinstance(at, int) or not 0 <= at < len(self._items) - self._begin:
            return self._all()[at]
        self._render.looked_at(self._begin + at)
        return self._items[self._begin + at]

    def __len__(self) -> int:
        return len(self._all())

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
        self._render, self._items, self.index0 = render, items, index
        self.index, self.first = index + 1, index == 0

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
