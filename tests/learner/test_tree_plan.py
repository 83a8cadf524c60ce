"""The block plan lists every visible block once, and marks only completely visible blocks as complete."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.learner.attention.tree_plan import MIN_PROGRAMS, PLAN_ROW, Tile, Tiles, plan, rows_at, shares, tiles_for
from arborl.learner.core.packing import pack
from arborl.rollout.token_trees import build_token_trees, tree_of_sequences

SIDES = st.tuples(st.sampled_from([1, 3, 8, 16]), st.sampled_from([1, 4, 8, 32]))


def forest(seed: int, longest: int):
    rng = np.random.default_rng(seed)

    def tree(branches):
        stem = rng.integers(0, 2, longest).tolist()
        rows = [
            stem[: rng.integers(0, longest)] + rng.integers(2, 9, rng.integers(1, longest)).tolist()
            for _ in range(branches)
        ]
        return tree_of_sequences(rows)[0]

    trees = [tree(rng.integers(1, 6)) for _ in range(rng.integers(1, 4))]
    return pack(trees, list(range(len(trees))), build_token_trees([]).terms)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    longest=st.integers(2, 60),
    window=st.sampled_from([None, 1, 5, 30]),
    sides=st.tuples(SIDES, SIDES, SIDES),
)
def test_each_pair_that_is_seen_is_in_one_listed_block_and_in_whole_ones_all_are_seen(seed, longest, window, sides):
    batch = forest(seed, longest)
    count, place = len(batch), np.arange(len(batch))
    sees = (place[None] <= place[:, None]) & (place[:, None] < batch.end[None])
    if window:
        sees &= batch.depth[:, None] - batch.depth[None] < window
    tiles = Tiles(*(Tile(queries, keys, 4, 1) for queries, keys in sides))
    made = plan(batch.end, batch.depth, window, tiles)
    assert made.dtype == np.int32
    np.testing.assert_array_equal(made[: 2 * count], np.concatenate([batch.end, batch.depth]))
    for number, (tile, start) in enumerate(zip(tiles, rows_at(count, tiles), strict=True)):
        by_keys = number == 2
        blocks = -(-count // (tile.keys if by_keys else tile.queries))
        rows = made[start : start + PLAN_ROW * blocks].reshape(-1, PLAN_ROW)
        assert sorted(rows[:, 0]) == list(range(blocks))
        assert (np.diff(rows[:, 3] - rows[:, 1]) <= 0).all()  # the longest first
        left = sees.copy()
        for block, begin, middle, stop in rows:
            for at in range(begin, stop):
                q, k = (made[at], block) if by_keys else (block, made[at])
                here = np.s_[q * tile.queries : (q + 1) * tile.queries, k * tile.keys : (k + 1) * tile.keys]
                assert at >= middle or (sees[here].all() and sees[here].shape == (tile.queries, tile.keys))
                assert window or sees[here].any()
                left[here] = False
        assert not left.any()


@given(blocks=st.integers(1, 3000), group=st.integers(1, 48))
def test_the_heads_of_a_group_are_shared_out_among_as_many_programs_as_keep_the_device_busy(blocks, group):
    parts, each = shares(blocks, group)
    assert (parts - 1) * each < group <= parts * each
    assert parts == 1 or blocks * (parts - 1) < MIN_PROGRAMS
    assert parts == group or each == 1 or blocks * parts * 2 >= MIN_PROGRAMS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_up_to_256_numbers_have_tiles_and_others_none(dtype):
    assert all(tiles_for(size, dtype) is not None for size in (1, 64, 80, 256))
    assert tiles_for(257, dtype) is None
    assert tiles_for(64, torch.float64) is None
