"""Which page of the cache holds which tokens: a prefix tree over pages, shared by reference.

A page holds the keys and values of up to `size` consecutive tokens. A request holds a `Path`: the pages of its sequence
from the start. Full pages that two sequences have in common are one page with two holders; of a page they share in
part, the later one takes a copy. Pages nobody holds stay, as memory of what was read, until room is needed: the one let
go longest ago goes first, leaves before what they grew from. Bookkeeping only: nothing here touches a tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
NONE: Tokens = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Node:
    """One page. There is one object for each, used again and again: a pool that makes none keeps the garbage collector
    out of the sampling loop."""

    page: int
    parent: Node | None = None
    tokens: Tokens = field(default_factory=lambda: NONE)
    """What others may find here; empty until it is known to have been read."""
    text: bytes = b""
    """The same, as bytes: they are compared at once."""
    holders: int = 0
    full: dict[bytes, Node] = field(default_factory=dict)
    """Children that are full, by all their tokens."""
    children: dict[int, list[Node]] = field(default_factory=dict)
    """All children, by the first of their tokens, sorted by `text`: those that begin alike lie side by side."""


@dataclass(slots=True, eq=False)
class Path:
    """The pages of one request, from the start of its sequence."""

    nodes: list[Node]
    found: int = 0
    """Tokens that were there already."""
    copy: tuple[int, int, int] | None = None
    """(from page, to page, tokens): to be copied before anything else is read."""
    published: int = 0
    """Full pages at its start that others can find."""


class Pages:
    """Hands out `count` pages of `size` tokens.

    Example:
        pages = Pages(count=100, size=16)
        path = pages.open(prompt)
        pages.extend(path, 40)            # pages for 40 tokens; False when there is no room
        pages.publish(path, tokens[:40])  # they have been read: others may use them
        pages.close(path)                 # let go; what was published stays until room is needed
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.reset()

    def reset(self) -> None:
        """All pages are free, whoever held them."""
        self.root = Node(-1)
        self.nodes = [Node(page) for page in range(self.count)]
        self.free = list(range(self.count - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Leaves nobody holds, by page, the one let go longest ago first."""
        self.held = 0
        """Pages somebody holds."""

    @property
    def room(self) -> int:
        """Pages that could be handed out now, counting those that would be forgotten for it."""
        return self.count - self.held

    def needed(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self.size)

    def open(self, tokens: Tokens, reuse: bool = True) -> Path:
        """Hold what is known of `tokens`: the longest common prefix."""
        path, node = Path([]), self.root
        if not reuse:
            return path
        text, step = tokens.tobytes(), self.size * tokens.itemsize
        while (child := node.full.get(text[len(path.nodes) * step : (len(path.nodes) + 1) * step])) is not None:
            self._hold(child)
            path.nodes.append(child)
            node = child
        path.found, path.published = len(path.nodes) * self.size, len(path.nodes)
        last, common = self._longest(node, tokens[path.found : path.found + self.size])
        if last is None:
            return path
        if last.holders or common < len(last.tokens):
            return self._fork(path, last, common, tokens[path.found :])
        self._hold(last)
        path.nodes.append(last)
        path.found += common
        return path

    def extend(self, path: Path, tokens: int) -> bool:
        """Give the path pages for `tokens` tokens in all. False, and nothing given, when there is no room."""
        missing = self.needed(tokens) - len(path.nodes)
        if missing > self.room:
            return False
        for _ in range(missing):
            self._grow(path)
        return True

    def publish(self, path: Path, tokens: Tokens) -> None:
        """The keys and values of these first tokens of the path are there: let others find them."""
        for index in range(path.published, self.needed(len(tokens))):
            node, own = path.nodes[index], tokens[index * self.size : (index + 1) * self.size]
            if len(own) > len(node.tokens):
                self._show(node, own.copy())
            path.published += len(own) == self.size

    def close(self, path: Path) -> None:
        """Let go. Pages never published are free at once."""
        for node in reversed(path.nodes):
            node.holders -= 1
            if node.holders:
                continue
            self.held -= 1
            if not len(node.tokens):
                self.free.append(node.page)
            elif not node.children:
                self.idle[node.page] = None
        path.nodes = []

    def forget(self) -> None:
        """The weights have changed: nothing that was read counts any more. No path may be open."""
        if self.held:
            raise RuntimeError(f"{self.held} pages are still held")
        found = [self.root]
        for node in found:  # grows meanwhile: whatever is not free hangs on the root
            found.extend(child for some in node.children.values() for child in some)
            node.tokens, node.text, node.parent = NONE, b"", None
            node.full.clear()
            node.children.clear()
        self.idle.clear()
        self.free.extend(node.page for node in found[1:])
        self.free.sort(reverse=True)

    def _longest(self, node: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """The child that shares most with `tokens`, and how much; of equals, one that nobody is writing to."""
        children = node.children.get(int(tokens[0]), []) if len(tokens) else []
        if not children:
            return None, 0
        text = tokens.tobytes()
        at = bisect_left(children, text, key=_text)
        most = max(common_prefix(child.tokens, tokens) for child in children[max(at - 1, 0) : at + 1])
        shared = text[: most * tokens.itemsize]
        first = at = bisect_left(children, shared, key=_text)
        while at < len(children) and children[at].text.startswith(shared):
            if not children[at].holders:
                return children[at], most
            at += 1
        return children[first], most

    def _fork(self, path: Path, source: Node, count: int, tokens: Tokens) -> Path:
        """Take a copy of part of a page, if there is room. The source is held meanwhile, so that none is made of it.

        It replaces a page that would say nothing the copy does not, such as the one the session had until a sibling
        read what the session says next: pages in use then stay close together.
        """
        self._hold(source)
        if (outgrown := self._outgrown(source, tokens)) is not None:
            self._forget(outgrown)
        if self.room:
            path.copy = (source.page, self._grow(path).page, count)
            path.found += count
        self.close(Path([source]))
        return path

    def _outgrown(self, source: Node, tokens: Tokens) -> Node | None:
        """A page beside `source` that nobody needs and all of whose tokens these begin with."""
        assert source.parent is not None
        beside, text = source.parent.children[int(source.tokens[0])], tokens.tobytes()
        while text:
            at = bisect_right(beside, text, key=_text)
            if not at:
                return None
            node = beside[at - 1]  # what begins `text` is this, or shorter
            size = len(node.text)
            if text.startswith(node.text):
                same = beside[bisect_left(beside, node.text, key=_text) : at]
                if (idle := next((one for one in same if one.page in self.idle), None)) is not None:
                    return idle
                size -= tokens.itemsize
            else:  # what both begin with
                size = common_prefix(node.tokens, tokens) * tokens.itemsize
            text = text[:size]
        return None

    def _hold(self, node: Node) -> None:
        if not node.holders:
            self.held += 1
            self.idle.pop(node.page, None)
        node.holders += 1

    def _grow(self, path: Path) -> Node:
        """One more page at the end of the path. There must be room."""
        if not self.free:
            self._forget(self.nodes[next(iter(self.idle))])
        node = self.nodes[self.free.pop()]
        node.parent = path.nodes[-1] if path.nodes else self.root
        node.holders = 1
        self.held += 1
        path.nodes.append(node)
        return node

    def _show(self, node: Node, tokens: Tokens) -> None:
        assert node.parent is not None
        siblings = node.parent.children.setdefault(int(tokens[0]), [])
        if len(node.tokens):
            siblings.remove(node)
        node.tokens, node.text = tokens, tokens.tobytes()
        insort(siblings, node, key=_text)
        if len(tokens) == self.size:
            node.parent.full.setdefault(node.text, node)

    def _forget(self, node: Node) -> None:
        """Free a page that is idle."""
        del self.idle[node.page]
        parent = node.parent
        assert parent is not None
        siblings = parent.children[int(node.tokens[0])]
        siblings.remove(node)
        if not siblings:
            del parent.children[int(node.tokens[0])]
        if parent.full.get(key := node.text) is node:
            del parent.full[key]
            twin = next((n for n in siblings if n.text == key), None)
            if twin is not None:
                parent.full[key] = twin
        node.tokens, node.text, node.parent = NONE, b"", None
        self.free.append(node.page)
        if parent is not self.root and not parent.children and not parent.holders:
            self.idle[parent.page] = None
            self.idle.move_to_end(parent.page, last=False)


def _text(node: Node) -> bytes:
    return node.text


def common_prefix(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    """How many tokens two sequences begin with in common."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())
