"""Chat templates with traced loops.

`trace_loops` rewrites the loops of a template that write text, such as `for message in messages`, so that
`incremental.py` supplies their items and records the text of each iteration. The traced objects record what an
iteration reads: other messages, namespaces, and the loop's position relative to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from arborl.chat.incremental import TemplateRender

ITERATIONS, LOOP = "arbor_iterations", "arbor_loop"  # variables of a traced template; no template has these names
COMPOSED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
"""Nodes of templates that consist of several."""
SCALARS = (str, int, float, bool, type(None))
ALL_MESSAGES = 1 << 60  # index beyond any conversation: an iteration that read so far depends on the conversation's end
MISSING = object()


class Untraceable(Exception):
    """The template does something that tracing does not support."""


def trace_loops(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template | None:
    """The template with traced loops; None if it has no traceable loop."""
    tree = environment.parse(source)
    loops = [] if any(tree.find_all(COMPOSED)) else list(_text_loops(tree.body))
    macros = nodes.Template(list(tree.find_all(nodes.Macro))).set_environment(environment)
    macro_names = meta.find_undeclared_variables(macros)  # type: ignore[arg-type]
    for number, loop in enumerate(loops):
        body = nodes.Template([nodes.For(loop.target, nodes.List([]), loop.body, [], None, False)])
        names = meta.find_undeclared_variables(body.set_environment(environment))  # type: ignore[arg-type]
        outer = sorted({*names, *macro_names} - {"namespace"})
        values = nodes.Dict([nodes.Pair(nodes.Const(name), nodes.Name(name, "load")) for name in outer])
        for name in list(_loop_names(loop.body)):
            name.name = LOOP
        stored: list[Any] = [loop.target, nodes.Name(LOOP, "store")]
        loop.target = nodes.Tuple(stored, "store")
        args: list[Any] = [nodes.Const(number), loop.iter, values]
        loop.iter = nodes.Call(nodes.Name(ITERATIONS, "load"), args, [], None, None)
    tree.set_lineno(1).set_environment(environment)
    return environment.from_string(tree) if loops else None  # type: ignore[arg-type]


def _text_loops(body: Iterable[nodes.Node]) -> Iterator[nodes.For]:
    """Loops at the top level, or in its conditions, that write text."""
    for node in body:
        if isinstance(node, nodes.If):
            yield from _text_loops([*node.body, *node.elif_, *node.else_])
        elif isinstance(node, nodes.For) and node.test is None and not node.recursive:
            yield from [node] if node.find(nodes.Output) is not None and node.find(nodes.Macro) is None else []


def _loop_names(body: Iterable[nodes.Node]) -> Iterator[nodes.Name]:
    """Uses of `loop` that mean this loop and not an inner one."""
    for node in body:
        if isinstance(node, nodes.Name) and node.name == "loop":
            yield node
        elif isinstance(node, nodes.For):
            yield from _loop_names([node.iter, *node.else_])
        else:
            yield from _loop_names(node.iter_child_nodes())


class TracedMessages(Sequence[Any]):
    """The messages from index `begin` on; records which are read."""

    def __init__(self, render: TemplateRender, items: list[Any], begin: int):
        self._render, self._items, self.begin = render, items, begin

    @property
    def items(self) -> list[Any]:
        """The messages, for a traced loop over them."""
        return self._items[self.begin :]

    def _read_all(self) -> list[Any]:
        self._render.record_read(ALL_MESSAGES)
        return self.items

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            begin = at.start or 0
            if at.stop is None and at.step in (None, 1) and isinstance(begin, int) and begin >= 0:
                return TracedMessages(self._render, self._items, self.begin + begin)
            return self._read_all()[at]
        if not isinstance(at, int) or not 0 <= at < len(self._items) - self.begin:
            return self._read_all()[at]
        self._render.record_read(self.begin + at)
        return self._items[self.begin + at]

    def __len__(self) -> int:
        return len(self._read_all())

    def __bool__(self) -> bool:
        has_items = len(self._items) > self.begin
        self._render.record_read(self.begin if has_items else ALL_MESSAGES)
        return has_items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read_all())

    def __eq__(self, other: object) -> bool:
        return self._read_all() == (other._read_all() if isinstance(other, TracedMessages) else other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> list[Any]:
        return self._read_all() + list(other)

    def __radd__(self, other: Any) -> list[Any]:
        return list(other) + self._read_all()

    def __repr__(self) -> str:
        return repr(self._read_all())


class TracedNamespace(Namespace):
    """A namespace outside the loop; records the values that an iteration reads and writes."""

    def __init__(self, render: TemplateRender, number: int, *args: Any, **values: Any):
        object.__setattr__(self, "_trace", (render, number))
        super().__init__(*args, **values)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        render, number = object.__getattribute__(self, "_trace")
        value = namespace_values(self).get(name, MISSING)
        current = render.iteration
        if current is not None and not any(known[:2] == (number, name) for known in (*current.written, *current.read)):
            current.read.append((number, name, value))
        if value is MISSING:
            raise AttributeError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        render, number = object.__getattribute__(self, "_trace")
        if render.iteration is not None:
            if not isinstance(value, SCALARS):
                raise Untraceable("a mutable value in a namespace")
            render.iteration.written.append((number, name, value))
        super().__setitem__(name, value)


def namespace_values(space: TracedNamespace) -> dict[str, Any]:
    return object.__getattribute__(space, "_Namespace__attrs")  # type: ignore[no-any-return]


def namespace_number(space: TracedNamespace) -> int:
    return object.__getattribute__(space, "_trace")[1]  # type: ignore[no-any-return]


class TracedLoop:
    """Jinja's `loop`; records whether an iteration reads what lies ahead."""

    depth, depth0 = 1, 0

    def __init__(self, render: TemplateRender, items: Sequence[Any], index: int):
        self._render, self._items, self.index0 = render, items, index
        self.index, self.first = index + 1, index == 0

    def _ahead(self) -> int:
        """Number of remaining iterations, which grows with the conversation."""
        self._render.record_read(ALL_MESSAGES)
        return len(self._items) - self.index

    @property
    def last(self) -> bool:
        return self.index == len(self._items) and not self._ahead()  # False stays False when the conversation grows

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
        assert self._render.iteration is not None
        self._render.iteration.next_item = self._items[self.index]
        return self._items[self.index]

    def cycle(self, *values: Any) -> Any:
        if not values:
            raise TypeError("no items for cycling given")
        return values[self.index0 % len(values)]

    def _untraceable(self, *args: Any) -> NoReturn:
        raise Untraceable("the loop object itself is used, or `loop.changed`")

    changed: Callable[..., NoReturn] = _untraceable
    __call__ = __str__ = __repr__ = __len__ = __iter__ = _untraceable
