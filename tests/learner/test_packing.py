"""Packing: every term once, in the context it was sampled in, in micro-batches that fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import forest_of, random_groups

from arborl.learner.core import packing
from arborl.learner.core.packing import (
    ForwardCosts,
    branch_starts,
    has_split_tree,
    prune_tree,
    rows_are_cheaper,
    segment_starts,
    split,
)
from arborl.rollout.token_trees import tree_of_sequences
from arborl.types import Call, Completion, Episode, FinishReason, Group, Task, TokenTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=7)


def contexts(tokens, end, depth, positions) -> list[tuple[int, ...]]:
    """What each position sees, by the rule itself; and its depth is how much that is before it."""
    seen = []
    for q in positions:
        visible = [k for k in range(q + 1) if q < end[k]]
        assert depth[q] == len(visible) - 1
        seen.append(tuple(int(tokens[k]) for k in visible))
    return seen


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 60), rows=st.booleans())
def test_every_term_is_in_one_micro_batch_in_the_context_it_was_sampled_in(seed, budget, rows):
    trees, terms = forest_of(random_groups(seed))
    batches = split(trees, terms, budget, (lambda tree: True) if rows else None)
    assert sorted(np.concatenate([batch.rows for batch in batches]).tolist()) == list(range(len(terms)))
    for batch in batches:
        ours = contexts(batch.tokens, batch.end, batch.depth, batch.terms.position)
        for row, context in zip(batch.rows, ours, strict=True):
            tree, position = trees[terms.tree[row]], terms.position[row]
            assert contexts(tree.tokens, tree.end, tree.depth, [position]) == [context]
        assert (batch.terms.token == terms.token[batch.rows]).all()
        if rows:
            assert batch.is_unbranched


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 60), alike=st.sampled_from([1, 2, 4]))
def test_trees_that_begin_alike_share_it_and_every_term_keeps_its_context(monkeypatch, seed, budget, alike):
    monkeypatch.setattr(packing, "MIN_SHARED_PREFIX", alike)
    trees, terms = forest_of(random_groups(seed, vocabulary=2))
    apart, together = (split(trees, terms, budget, merge=shared) for shared in (False, True))
    assert [sorted(batch.rows.tolist()) for batch in together] == [sorted(batch.rows.tolist()) for batch in apart]
    assert sum(map(len, together)) <= sum(map(len, apart))
    for batch in together:
        assert len(batch) == sum(batch.lengths)
        ours = contexts(batch.tokens, batch.end, batch.depth, batch.terms.position)
        for row, context in zip(batch.rows, ours, strict=True):
            tree, position = trees[terms.tree[row]], terms.position[row]
            assert contexts(tree.tokens, tree.end, tree.depth, [position]) == [context]


def group_of(prompt: list[int], *replies: list[int]) -> Group:
    calls = [
        Call(tuple(prompt), Completion(tuple(reply), (-1.0,) * len(reply), FinishReason.STOP), 0) for reply in replies
    ]
    return Group(Task("t"), [Episode(f"{n}", Task("t"), calls=[call]) for n, call in enumerate(calls)])


def test_what_several_trees_begin_with_is_there_once():
    stem = list(range(30))
    groups = [
        group_of(stem, [40, 41, 0], [42, 0]), group_of(stem[:20], [60, 61, 0], [62, 0]),
        group_of(stem, [50, 0], [51, 0]), group_of([7], [8, 0]),
    ]  # fmt: skip
    (batch,) = split(*forest_of(groups), 1000, merge=True)
    assert sorted(batch.lengths) == [3, 30 + 5 + 5 + 4]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 60))
def test_a_micro_batch_is_within_the_budget_or_a_single_branch(seed, budget):
    trees, terms = forest_of(random_groups(seed))
    for batch in split(trees, terms, budget):
        assert len(batch) <= budget or (batch.is_unbranched and len(batch.lengths) == 1)


def pieces_of(tree: TokenTree, starts: tuple[int, ...]) -> list[int]:
    """Sizes of the pieces that begin at these places."""
    bounds = [*starts, len(tree)]
    return [int(tree.depth[a]) + b - a for a, b in itertools.pairwise(bounds)]


@settings(max_examples=60)
@given(sequences=SEQUENCES, budget=st.integers(3, 30))
def test_cuts_repeat_as_few_tokens_as_any_cuts_could(sequences, budget):
    tree, _ = tree_of_sequences(sequences)
    longest = int(tree.depth.max()) + 1
    budget = max(budget, longest)
    found = pieces_of(tree, tuple(segment_starts(tree, budget)))
    assert max(found) <= budget
    places = range(1, len(tree))  # anywhere, not only where branch_starts begin
    all_ways = (c for n in range(4) for c in itertools.combinations(places, n)) if len(tree) < 16 else []
    sizes = [pieces_of(tree, (0, *way)) for way in all_ways]
    fitting = [sum(size) for size in sizes if max(size) <= budget]
    if fitting and len(found) <= 4:
        assert sum(found) <= min(fitting)


def test_only_a_tree_spread_over_several_micro_batches_counts_as_cut():
    trees, terms = forest_of(random_groups(1))
    assert not has_split_tree(split(trees, terms, 10_000))
    assert has_split_tree(split(trees, terms, 1))


def test_rows_are_taken_only_where_little_is_shared_and_rows_are_cheaper():
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 99, 20).tolist()

    def bush(shared: int) -> TokenTree:
        return tree_of_sequences([stem[:shared] + rng.integers(0, 99, 300).tolist() for _ in range(4)])[0]

    cheap_tokens, dear_tokens = ForwardCosts(token=1.0, pair=1.0), ForwardCosts(token=1e6, pair=1.0)
    assert rows_are_cheaper(bush(5), cheap_tokens)
    assert not rows_are_cheaper(bush(5), dear_tokens)  # five tokens more cost more than the masks
    assert not rows_are_cheaper(tree_of_sequences([stem, [*stem[:15], 1, 2, 3]])[0], cheap_tokens)
    assert not rows_are_cheaper(tree_of_sequences([stem])[0], cheap_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_a_pruned_tree_holds_what_some_places_see_and_they_see_the_same(seed):
    trees, terms = forest_of(random_groups(seed))
    for number in np.unique(terms.episode):
        rows = np.flatnonzero(terms.episode == number)
        tree = trees[terms.tree[rows[0]]]
        part, position = prune_tree(tree, terms.position[rows])
        assert len(part) == len({k for q in terms.position[rows] for k in range(q + 1) if q < tree.end[k]})
        for before, now in zip(terms.position[rows], position, strict=True):
            seen = [tree.tokens[k] for k in range(before + 1) if before < tree.end[k]]
            assert seen == [part.tokens[k] for k in range(now + 1) if now < part.end[k]]
            assert part.depth[now] == tree.depth[before]


def test_a_tree_within_the_budget_is_not_cut():
    tree, _ = tree_of_sequences([[1, 2, 3, 4], [1, 2, 5]])
    assert segment_starts(tree, 5).tolist() == [0]
    assert segment_starts(tree, 4).tolist() == [0, 4]
    assert branch_starts(tree).tolist() == [0, 4]
