"""Pages are shared, copied, forgotten and handed back, and none is ever lost or given twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.engines.local.block_pool import BlockPool, BlockTable


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def read(pages: BlockPool, tokens: np.ndarray) -> BlockTable:
    """Open, extend and publish: what a request does with its prompt."""
    path = pages.match_prefix(tokens)
    assert pages.extend(path, len(tokens))
    pages.publish(path, tokens)
    return path


def nodes(pages: BlockPool) -> list:
    found, queue = [], [pages.root]
    while queue:
        node = queue.pop()
        queue += [child for siblings in node.children.values() for child in siblings]
        found += [node] if node is not pages.root else []
    return found


def test_full_pages_are_shared_and_a_part_of_one_is_copied():
    pages = BlockPool(10, 4)
    first = read(pages, ids(1, 2, 3, 4, 5, 6, 7))
    second = pages.match_prefix(ids(1, 2, 3, 4, 5, 6, 9))
    assert second.cached == 6
    assert second.blocks[0] is first.blocks[0]
    assert second.copy == (first.blocks[1].id, second.blocks[1].id, 2)


def test_a_copy_replaces_the_page_it_outgrows_and_no_other():
    pages = BlockPool(10, 8)
    paths = [read(pages, ids(1, 2, *rest)) for rest in ((3, 4, 5, 6), (3,), (7,))]
    ahead, own, other = (path.blocks[0].id for path in paths)
    for path in paths[1:]:
        pages.free(path)
    path = pages.match_prefix(ids(1, 2, 3, 4, 5, 9))
    assert path.cached == 5
    assert path.copy == (ahead, own, 5)
    assert other in {node.id for node in nodes(pages)}
    assert pages.match_prefix(ids(1, 2, 7, 8)).blocks[0].id == other


def test_a_partial_block_without_a_writer_is_reused():
    pages = BlockPool(10, 4)
    first = read(pages, ids(1, 2, 3, 4, 5, 6))
    kept = list(first.blocks)
    pages.free(first)
    second = pages.match_prefix(ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert second.blocks == kept
    assert (second.cached, second.copy) == (6, None)


def test_what_was_let_go_longest_ago_is_forgotten_first_and_leaves_before_their_stem():
    pages = BlockPool(4, 2)
    old, new = read(pages, ids(1, 2, 3, 4)), read(pages, ids(5, 6))
    pages.free(old)
    pages.free(new)
    read(pages, ids(7, 8, 9, 9))  # takes the free page, then the leaf of the oldest
    assert pages.match_prefix(ids(1, 2, 3, 4)).cached == 2
    assert pages.match_prefix(ids(5, 6)).cached == 2


def test_pages_that_are_held_are_never_given_away():
    pages = BlockPool(3, 2)
    held = read(pages, ids(1, 2, 3, 4))
    other = pages.match_prefix(ids(9, 9, 9, 9))
    assert not pages.extend(other, 4)
    assert len(other.blocks) == 0
    assert pages.extend(other, 2)
    assert {n.id for n in held.blocks}.isdisjoint(n.id for n in other.blocks)


def test_forgetting_while_something_is_held_is_refused():
    pages = BlockPool(3, 2)
    path = read(pages, ids(1, 2))
    with pytest.raises(RuntimeError, match="1 blocks are still referenced"):
        pages.clear_cache()
    pages.free(path)
    pages.clear_cache()
    assert pages.match_prefix(ids(1, 2)).cached == 0


@settings(max_examples=60)
@given(
    size=st.sampled_from([1, 2, 3, 8]),
    count=st.integers(4, 12),
    actions=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=8)), max_size=40),
)
def test_every_page_is_free_or_findable_or_held_and_contents_are_what_they_say(size, count, actions):
    """A memory of what was written stands in for the tensors: whatever is found must have been written there."""
    pages = BlockPool(count, size)
    written: dict[int, list[int]] = {page: [-1] * size for page in range(count)}
    live: list[tuple[BlockTable, np.ndarray]] = []
    for kind, tokens in actions:
        if kind == 3 and live:
            path, _ = live.pop(0)
            pages.free(path)
            continue
        row = ids(*tokens)
        path = pages.match_prefix(row)
        if path.copy:
            source, target, n = path.copy
            written[target][:n] = written[source][:n]
        for place in range(path.cached):
            assert written[path.blocks[place // size].id][place % size] == row[place]
        if not pages.extend(path, len(row)):
            pages.free(path)
            continue
        for place in range(path.cached, len(row)):
            written[path.blocks[place // size].id][place % size] = int(row[place])
        if kind:
            pages.publish(path, row)
        live.append((path, row))
        for other, own in live:  # no sequence was overwritten
            assert [written[other.blocks[i // size].id][i % size] for i in range(len(own))] == own.tolist()
    held = {node.id for path, _ in live for node in path.blocks}
    assert pages.num_used == len(held)
    assert held.isdisjoint(pages.free_ids)
    assert len(set(pages.free_ids)) == len(pages.free_ids)
    assert held | {node.id for node in nodes(pages)} | set(pages.free_ids) == set(range(count))
    for path, _ in live:
        pages.free(path)
    assert pages.num_available == count
    assert pages.extend(pages.match_prefix(ids(99)), count * size)  # all of it can be handed out again
