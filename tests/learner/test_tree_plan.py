"""The block plan lists every visible block once, and marks only completely visible blocks as complete."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.learner.attention import tree_plan
from arborl.learner.attention.tree_plan import (
    KEY_PROGRAMS,
    KEY_ROW,
    PLAN_ROW,
    SUM_ROW,
    Tile,
    Tiles,
    divide,
    plan,
    rows_at,
    tiles_for,
)
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
    programs=st.sampled_from([1, 20, KEY_PROGRAMS]),
)
def test_each_pair_that_is_seen_is_in_one_listed_block_and_in_whole_ones_all_are_seen(
    seed, longest, window, sides, programs
):
    batch = forest(seed, longest)
    count, place = len(batch), np.arange(len(batch))
    sees = (place[None] <= place[:, None]) & (place[:, None] < batch.end[None])
    if window:
        sees &= batch.depth[:, None] - batch.depth[None] < window
    tiles = Tiles(*(Tile(queries, keys, 4, 1) for queries, keys in sides))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_plan, "KEY_PROGRAMS", programs)
        found = plan(batch.end, batch.depth, window, tiles, key_heads=2)
    made = found.numbers
    assert made.dtype == np.int32
    np.testing.assert_array_equal(made[: 2 * count], np.concatenate([batch.end, batch.depth]))
    *starts, sums_at = rows_at(count, tiles, found.key_rows)
    slots: dict[int, int] = {}
    for number, (tile, start) in enumerate(zip(tiles, starts, strict=True)):
        by_keys = number == 2
        blocks = -(-count // (tile.keys if by_keys else tile.queries))
        width, many = (KEY_ROW, found.key_rows) if by_keys else (PLAN_ROW, blocks)
        rows = made[start : start + width * many].reshape(-1, width)
        assert by_keys or len(set(rows[:, 0])) == len(rows)
        assert set(rows[:, 0]) == set(range(blocks))
        assert (np.diff(rows[:, 3] - rows[:, 1]) <= 0).all()  # the longest first
        left = sees.copy()
        listed = []
        for block, begin, middle, stop, *slot in rows:
            assert begin <= middle <= stop > begin
            if slot and slot[0] >= 0:
                assert slots.setdefault(slot[0], block) == block
            else:
                assert (rows[:, 0] == block).sum() == 1
            for at in range(begin, stop):
                q, k = (made[at], block) if by_keys else (block, made[at])
                listed.append((q, k))
                here = np.s_[q * tile.queries : (q + 1) * tile.queries, k * tile.keys : (k + 1) * tile.keys]
                assert at >= middle or (sees[here].all() and sees[here].shape == (tile.queries, tile.keys))
                assert window or sees[here].any()
                left[here] = False
        assert not left.any()
        assert len(set(listed)) == len(listed)
    assert sorted(slots) == list(range(found.slots))
    sums = made[sums_at : sums_at + SUM_ROW * found.sum_rows].reshape(-1, SUM_ROW)
    assert {slot: block for block, first, past in sums for slot in range(first, past)} == slots
    assert (sums[:, 2] - sums[:, 1] > 1).all()


def key_rows_of(batch, key_heads):
    tiles = tiles_for(64, torch.bfloat16)
    made = plan(batch.end, batch.depth, None, tiles, key_heads)
    at = rows_at(len(batch), tiles, made.key_rows)[2]
    return made, made.numbers[at : at + KEY_ROW * made.key_rows].reshape(-1, KEY_ROW)


@pytest.mark.parametrize("key_heads", [1, 2, 8])
@pytest.mark.parametrize("kind", ["shared prompt", "small", "chain"])
def test_no_program_for_keys_has_more_than_an_even_share_of_the_work(kind, key_heads):
    rng = np.random.default_rng(0)
    if kind == "shared prompt":
        prompt = rng.integers(0, 9, 100).tolist()
        trees = [tree_of_sequences([prompt + rng.integers(0, 9, 100).tolist() for _ in range(300)])[0]]
    else:
        trees = [tree_of_sequences([rng.integers(0, 9, 700 if kind == "small" else 16_000).tolist()])[0]]
    made, rows = key_rows_of(pack(trees, [0], build_token_trees([]).terms), key_heads)
    length = rows[:, 3] - rows[:, 1]
    assert length.max() <= -(-length.sum() * key_heads // KEY_PROGRAMS)
    assert made.slots <= 2 * KEY_PROGRAMS / key_heads  # so that they take little memory


def test_lists_that_are_not_too_long_are_not_divided():
    rows = np.array([[block, 10 * block, 10 * block + 4, 10 * block + 10] for block in range(5)])
    divided, sums, slots = divide(rows, 10)
    assert (divided[:, 4] == -1).all()
    assert (len(sums), slots) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_up_to_256_numbers_have_tiles_and_others_none(dtype):
    assert all(tiles_for(size, dtype) is not None for size in (1, 64, 80, 256))
    assert tiles_for(257, dtype) is None
    assert tiles_for(64, torch.float64) is None
