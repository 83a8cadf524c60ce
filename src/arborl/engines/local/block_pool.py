"""Allocation of KV-cache blocks, and the prefix cache: a tree of blocks shared by reference count.

A block holds the keys and values of up to `block_size` consecutive tokens. A `BlockTable` lists the blocks of one
sequence. Sequences with equal prefixes share full blocks; of a partly shared block the later sequence gets a copy.
Unreferenced blocks stay cached until memory is needed; then the least recently freed leaf is evicted first. This module
only does bookkeeping and touches no tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Block:
    """One block. The pool creates each object once and reuses it, which keeps the garbage collector out of sampling."""

    id: int
    parent: Block | None = None
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    """Tokens that other sequences may match; empty until the block is published."""
    key: bytes = b""
    ref_count: int = 0
    full_children: dict[bytes, Block] = field(default_factory=dict)
    children: dict[int, list[Block]] = field(default_factory=dict)
    """All children by their first token, sorted by `key`: equal prefixes are adjacent."""


@dataclass(slots=True, eq=False)
class BlockTable:
    blocks: list[Block]
    cached: int = 0
    """Tokens found in the prefix cache."""
    copy: tuple[int, int, int] | None = None
    """(source block, target block, tokens): copy these before the first step."""
    published: int = 0
    """Full blocks at the start that other sequences can match."""


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reset()

    def reset(self) -> None:
        """Free all blocks, referenced or not, and empty the prefix cache."""
        self.root = Block(-1)
        self.blocks = [Block(number) for number in range(self.num_blocks)]
        self.free_ids = list(range(self.num_blocks - 1, -1, -1))
        self.evictable: OrderedDict[int, None] = OrderedDict()
        """Unreferenced leaves by id, the least recently freed first."""
        self.num_used = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, including cached ones that would be evicted."""
        return self.num_blocks - self.num_used

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match_prefix(self, tokens: Tokens, reuse: bool = True) -> BlockTable:
        """A table that references the longest cached prefix of `tokens`; an empty table without `reuse`."""
        table, block = BlockTable([]), self.root
        if not reuse:
            return table
        data, step = tokens.tobytes(), self.block_size * tokens.itemsize
        while (
            child := block.full_children.get(data[len(table.blocks) * step : (len(table.blocks) + 1) * step])
        ) is not None:
            self._reference(child)
            table.blocks.append(child)
            block = child
        table.cached, table.published = len(table.blocks) * self.block_size, len(table.blocks)
        last, common = self._longest_match(block, tokens[table.cached : table.cached + self.block_size])
        if last is None:
            return table
        if last.ref_count or common < len(last.tokens):
            return self._copy_part(table, last, common, tokens[table.cached :])
        self._reference(last)
        table.blocks.append(last)
        table.cached += common
        return table

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Allocate blocks until the table holds `tokens` tokens; False, and no change, without memory."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            self._allocate(table)
        return True

    def publish(self, table: BlockTable, tokens: Tokens) -> None:
        """Put these first tokens of the table into the prefix cache: their keys and values are computed."""
        for index in range(table.published, self.blocks_for(len(tokens))):
            block, part = table.blocks[index], tokens[index * self.block_size : (index + 1) * self.block_size]
            if len(part) > len(block.tokens):
                self._insert(block, part.copy())
            table.published += len(part) == self.block_size

    def free(self, table: BlockTable) -> None:
        """Drop the table's references. Unpublished blocks are free at once."""
        for block in reversed(table.blocks):
            block.ref_count -= 1
            if block.ref_count:
                continue
            self.num_used -= 1
            if not len(block.tokens):
                self.free_ids.append(block.id)
            elif not block.children:
                self.evictable[block.id] = None
        table.blocks = []

    def clear_cache(self) -> None:
        """Empty the prefix cache, because the weights changed. No block may be referenced."""
        if self.num_used:
            raise RuntimeError(f"{self.num_used} blocks are still referenced")
        found = [self.root]
        for block in found:  # grows while it is read: every cached block is a descendant of the root
            found.extend(child for children in block.children.values() for child in children)
            block.tokens, block.key, block.parent = NO_TOKENS, b"", None
            block.full_children.clear()
            block.children.clear()
        self.evictable.clear()
        self.free_ids.extend(block.id for block in found[1:])
        self.free_ids.sort(reverse=True)

    def _longest_match(self, block: Block, tokens: Tokens) -> tuple[Block | None, int]:
        """The child with the longest common prefix and its length; among equals one without references."""
        children = block.children.get(int(tokens[0]), []) if len(tokens) else []
        if not children:
            return None, 0
        data = tokens.tobytes()
        at = bisect_left(children, data, key=_key)
        longest = max(common_prefix(child.tokens, tokens) for child in children[max(at - 1, 0) : at + 1])
        shared = data[: longest * tokens.itemsize]
        first = at = bisect_left(children, shared, key=_key)
        while at < len(children) and children[at].key.startswith(shared):
            if not children[at].ref_count:
                return children[at], longest
            at += 1
        return children[first], longest

    def _copy_part(self, table: BlockTable, source: Block, count: int, tokens: Tokens) -> BlockTable:
        """Append a copy of the first `count` tokens of `source`, if a block is available. The source is referenced
        meanwhile, so that it is not evicted. The copy replaces a cached block that is a prefix of `tokens`, such as the
        one the session had until a sibling computed its next tokens: used blocks then stay close together."""
        self._reference(source)
        if (outgrown := self._cached_prefix(source, tokens)) is not None:
            self._evict(outgrown)
        if self.num_available:
            table.copy = (source.id, self._allocate(table).id, count)
            table.cached += count
        self.free(BlockTable([source]))
        return table

    def _cached_prefix(self, source: Block, tokens: Tokens) -> Block | None:
        """An evictable sibling of `source` whose tokens are a prefix of `tokens`."""
        assert source.parent is not None
        siblings, data = source.parent.children[int(source.tokens[0])], tokens.tobytes()
        while data:
            at = bisect_right(siblings, data, key=_key)
            if not at:
                return None
            block = siblings[at - 1]  # a prefix of `data` is this block or a shorter one
            size = len(block.key)
            if data.startswith(block.key):
                equal = siblings[bisect_left(siblings, block.key, key=_key) : at]
                if (found := next((one for one in equal if one.id in self.evictable), None)) is not None:
                    return found
                size -= tokens.itemsize
            else:
                size = common_prefix(block.tokens, tokens) * tokens.itemsize
            data = data[:size]
        return None

    def _reference(self, block: Block) -> None:
        if not block.ref_count:
            self.num_used += 1
            self.evictable.pop(block.id, None)
        block.ref_count += 1

    def _allocate(self, table: BlockTable) -> Block:
        if not self.free_ids:
            self._evict(self.blocks[next(iter(self.evictable))])
        block = self.blocks[self.free_ids.pop()]
        block.parent = table.blocks[-1] if table.blocks else self.root
        block.ref_count = 1
        self.num_used += 1
        table.blocks.append(block)
        return block

    def _insert(self, block: Block, tokens: Tokens) -> None:
        assert block.parent is not None
        siblings = block.parent.children.setdefault(int(tokens[0]), [])
        if len(block.tokens):
            siblings.remove(block)
        block.tokens, block.key = tokens, tokens.tobytes()
        insort(siblings, block, key=_key)
        if len(tokens) == self.block_size:
            block.parent.full_children.setdefault(block.key, block)

    def _evict(self, block: Block) -> None:
        del self.evictable[block.id]
        parent = block.parent
        assert parent is not None
        siblings = parent.children[int(block.tokens[0])]
        siblings.remove(block)
        if not siblings:
            del parent.children[int(block.tokens[0])]
        if parent.full_children.get(key := block.key) is block:
            del parent.full_children[key]
            twin = next((one for one in siblings if one.key == key), None)
            if twin is not None:
                parent.full_children[key] = twin
        block.tokens, block.key, block.parent = NO_TOKENS, b"", None
        self.free_ids.append(block.id)
        if parent is not self.root and not parent.children and not parent.ref_count:
            self.evictable[parent.id] = None
            self.evictable.move_to_end(parent.id, last=False)


def _key(block: Block) -> bytes:
    return block.key


def common_prefix(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())
