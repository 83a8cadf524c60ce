"""A template's loops, as its syntax tree has them: rewritten so that `rounds.py` runs each, round by round.

A loop `for message in messages` asks `rounds.py` for its items, its `loop`, and the content of each item. Where the
content goes into the text unchanged it is read from the third; what else looks at it (a test, a filter) is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROUNDS, LOOP, CONTENT = "arbor_rounds", "arbor_loop", "arbor_content"
"""Names that a template is given for its loops; none of its own."""
OWN_TEXT = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
"""What a template that consists of others has."""
KINDS = frozenset({"string", "defined", "undefined", "none", "mapping"})
"""Tests that have the same result for all texts."""
DICT = frozenset(dir(dict))
TEXT, VALUE, OTHER = "text", "value", "other"
"""Where a node stands: its output is text of the template; its value is, as it is; neither."""


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
        apart = _content_apart(loop)
        stored: list[Any] = [loop.target, nodes.Name(LOOP, "store"), nodes.Name(CONTENT, "store")]
        loop.target = nodes.Tuple(stored, "store")
        given: list[Any] = [nodes.Const(number), loop.iter, seen, nodes.Const(apart)]
        loop.iter = nodes.Call(nodes.Name(ROUNDS, "load"), given, [], None, None)
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


# ------------------------------------------------------------------------------------------------ content


def _content_apart(loop: nodes.For) -> bool:
    """Have the loop read the content of its item as `CONTENT` or `LOOP.content`; False where it looks at the item as a
    whole, and nothing is changed."""
    if not isinstance(loop.target, nodes.Name):
        return False
    item, body = loop.target.name, nodes.Template(loop.body)
    lookups: Iterator[Any] = body.find_all((nodes.Getattr, nodes.Getitem))
    by_key = {id(one.node) for one in lookups if _key(one, item) is not None}
    by_key |= {id(asked.expr) for one in body.find_all(nodes.Compare) for asked in one.ops if _asks_for_key(one, asked)}
    if any(name.name == item and id(name) not in by_key for name in body.find_all(nodes.Name)):
        return False
    loop.body = [_rewritten(node, item, TEXT) for node in loop.body]
    return True


def _key(node: nodes.Node, item: str) -> str | None:
    """`content` of `item.content` and `item['content']`."""
    if not isinstance(node, nodes.Getattr | nodes.Getitem) or node.ctx != "load":
        return None
    if not isinstance(node.node, nodes.Name) or node.node.name != item:
        return None
    key = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
    return key if isinstance(key, str) and key not in DICT else None


def _asks_for_key(node: nodes.Compare, asked: nodes.Operand) -> bool:
    """`'tool_calls' in item`"""
    return isinstance(node.expr, nodes.Const) and asked.op in ("in", "notin") and len(node.ops) == 1


def _rewritten(node: nodes.Node, item: str, place: str) -> Any:
    """The node, with the content of the item read apart. `place` says what becomes of its value, or of its output."""
    if _key(node, item) == "content":
        loop = nodes.Name(LOOP, "load")
        return nodes.Name(CONTENT, "load") if place == VALUE else nodes.Getattr(loop, "content", "load")
    if isinstance(node, nodes.Test) and node.name in KINDS:
        return node
    for field, value in list(node.iter_fields()):
        within = _place_within(node, field, place)
        if isinstance(value, nodes.Node):
            setattr(node, field, _rewritten(value, item, within))
        elif isinstance(value, list):
            new = [_rewritten(one, item, within) if isinstance(one, nodes.Node) else one for one in value]
            setattr(node, field, new)
    return node


def _place_within(node: nodes.Node, field: str, place: str) -> str:
    """What becomes of a part of a node."""
    if isinstance(node, nodes.Output):
        return VALUE if place == TEXT else OTHER
    if isinstance(node, nodes.If | nodes.For):
        return place if field in ("body", "elif_", "else_") else OTHER
    if isinstance(node, nodes.Add | nodes.Concat):
        return place
    if isinstance(node, nodes.CondExpr):
        return place if field in ("expr1", "expr2") else OTHER
    if isinstance(node, nodes.Or) and isinstance(node.right, nodes.Const) and node.right.value == "":
        return place if field == "left" else OTHER
    return OTHER
