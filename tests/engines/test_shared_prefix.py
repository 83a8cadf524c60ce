"""Rows that begin with the same pages are found, and nothing is shared that must not be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arborl.engines.local.shared_prefix import PrefixGrouping, group_by_prefix, max_groups


def tables(*rows: list[int]) -> np.ndarray:
    """Pages a row, filled up with what an earlier row may have left there."""
    longest = max(map(len, rows))
    return np.array([[*row, *[0] * (longest - len(row))] for row in rows], dtype=np.int32)


def found(rows: list[list[int]], most: int = 8) -> list[tuple[int, list[int]]]:
    """Every page of a row but its last holds only what was read before."""
    bundles = group_by_prefix(tables(*rows), np.array([len(row) - 1 for row in rows]), most)
    members = [[row for row in some if row >= 0] for some in bundles.rows_MB.tolist()]
    return sorted(zip(bundles.blocks_M.tolist(), map(sorted, members), strict=True), key=lambda pair: pair[1])


def test_siblings_are_bundled_by_what_they_share():
    rows = [[1, 2, 5], [7, 8, 9], [1, 2, 6], [7, 8, 4], [1, 2, 3], [7, 8, 10], [1, 2, 11], [12, 13, 14]]
    assert found(rows) == [(2, [0, 2, 4, 6]), (2, [1, 3, 5])]


def test_a_row_with_pages_of_its_own_is_in_no_bundle():
    bundles = group_by_prefix(tables([1, 2], [1, 3], [4, 5]), np.array([1, 1, 1]), 8)
    assert bundles.shared_R.tolist() == [1, 1, 0]


def test_the_page_being_written_is_never_shared():
    assert found([[1, 2], [1, 2]]) == [(1, [0, 1])]
    assert found([[1], [1]]) == []


def test_a_large_group_becomes_several_bundles():
    assert [len(rows) for _, rows in found([[1, 2, 10 + i] for i in range(12)], most=4)] == [4, 4, 4]


def test_where_there_are_many_small_groups_those_that_save_most_are_bundled():
    pairs = [[1, 2, 3, 10], [4, 5, 11], [1, 2, 3, 12], [4, 5, 13]]
    assert found(pairs) == [(3, [0, 2])]


def test_groups_under_one_system_prompt_are_not_mixed_where_each_shares_more():
    first, second = [[1, 2, 3, 4, 20 + i] for i in range(4)], [[1, 5, 6, 7, 30 + i] for i in range(4)]
    assert found([*first, *second]) == [(4, [0, 1, 2, 3]), (4, [4, 5, 6, 7])]


def test_rows_that_share_a_system_prompt_alone_are_bundled_for_it():
    assert found([[1, 10 + i, 20 + i] for i in range(4)]) == [(1, [0, 1, 2, 3])]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=12), st.integers(2, 5))
def test_whatever_is_shared_is_the_same_and_was_read_and_each_row_is_in_one_bundle(rows, most):
    table, whole = tables(*rows), np.array([len(row) - 1 for row in rows])
    bundles = group_by_prefix(table, whole, most)
    seen = bundles.rows_MB[bundles.rows_MB >= 0].tolist()
    assert len(seen) == len(set(seen))
    assert (bundles.shared_R <= whole).all()
    for pages, some in zip(bundles.blocks_M, bundles.rows_MB, strict=True):
        members = some[some >= 0]
        assert 2 <= len(members) <= most
        assert pages > 0
        assert (bundles.shared_R[members] == pages).all()
        assert (table[members, :pages] == table[members[0], :pages]).all()
    assert (np.delete(bundles.shared_R, seen) == 0).all()


def test_bundles_are_kept_while_rows_grow_and_made_anew_when_rows_change():
    bundling = PrefixGrouping(8)
    before = bundling(tables([1, 2, 5], [1, 2, 6]), np.array([2, 2]))
    grown = bundling(tables([1, 2, 5, 9], [1, 2, 6, 8]), np.array([3, 3]))
    assert grown is before
    other = bundling(tables([1, 3, 5, 9], [1, 2, 6, 8]), np.array([3, 3]))
    assert other.blocks_M.tolist() == [1]
    assert bundling(tables([4, 3], [5, 2], [6, 1]), np.array([1, 1, 1])).blocks_M.tolist() == []


def test_bundles_are_made_anew_when_a_row_has_read_less_than_the_one_before_it_in_its_place():
    bundling = PrefixGrouping(8)
    bundling(tables([1, 2, 5], [1, 2, 6]), np.array([2, 2]))
    assert bundling(tables([1, 2, 5], [1, 2, 6]), np.array([2, 1])).blocks_M.tolist() == [1]


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 40), st.integers(2, 30)), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(2, 5),
)
def test_tokens_that_are_read_together_are_bundled_over_pages_that_all_of_them_see(alone, reads, size, most):
    starts = np.array([*[17] * alone, *(start for start, _ in reads)])
    counts = np.array([*[1] * alone, *(count for _, count in reads)])
    pages = np.arange(len(counts) * 80, dtype=np.int32).reshape(len(counts), 80)
    bundles = PrefixGrouping(most).of_step(pages, starts, counts, size)
    sequence = np.repeat(np.arange(len(counts)), counts)
    position = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
    seen = np.zeros(len(position), dtype=int)
    for shared, rows in zip(bundles.blocks_M, bundles.rows_MB, strict=True):
        rows = rows[rows >= 0]
        assert shared > 0
        assert len(rows) > 1
        assert len(set(sequence[rows])) == 1
        assert (position[rows] + 1 >= shared * size).all()
        assert (bundles.shared_R[rows] == shared).all()
        seen[rows] += 1
    assert (seen == (bundles.shared_R > 0)).all()
    assert len(bundles.blocks_M) <= max_groups(len(position))
