"""Trees are assigned to ranks with nearly equal work."""

from __future__ import annotations

import numpy as np
import pytest

from arborl.learner.core.packing import ForwardCosts
from arborl.learner.distributed.learner_group import assign_balanced, rank_part, tree_owners, tree_work
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Completion, Episode, FinishReason, Group, Task

COSTS = ForwardCosts(token=12 * 4096.0**2, pair=2 * 4096.0)


def ragged(rng: np.random.Generator, groups: int, episodes: int) -> list[Group]:
    """Groups as runs have them: prompts of very different length, several turns, replies whose length has a tail."""
    made = []
    for _ in range(groups):
        prompt = rng.integers(0, 50, int(rng.lognormal(5.5, 0.7))).tolist()
        played = []
        for name in range(episodes):
            context, calls = list(prompt), []
            for turn in range(int(rng.integers(1, 5))):
                reply = tuple(rng.integers(0, 50, 1 + int(rng.lognormal(4.0, 0.8))).tolist())
                calls.append(Call(tuple(context), Completion(reply, (-1.0,) * len(reply), FinishReason.STOP), turn))
                context = [*context, *reply, *rng.integers(0, 50, int(rng.lognormal(3.0, 0.5))).tolist()]
            played.append(Episode(f"{name}", Task("t"), calls=calls))
        made.append(Group(Task("t"), played))
    return made


@pytest.mark.parametrize(("groups", "ranks"), [(16, 2), (32, 4), (64, 8)])
def test_ragged_batches_are_spread_within_five_percent(groups, ranks):
    for seed in range(3):
        forest = build_token_trees(ragged(np.random.default_rng(seed), groups, 4))
        owner = tree_owners(forest.trees, forest.terms, ranks, [np.arange(groups)], COSTS)
        load = np.bincount(owner, tree_work(forest.trees, forest.terms, COSTS), minlength=ranks)
        assert load.max() / load.mean() < 1.05


def test_every_minibatch_is_spread_and_every_term_has_one_home():
    forest = build_token_trees(ragged(np.random.default_rng(5), 8, 2))
    halves = np.array_split(np.arange(8), 2)
    owner = tree_owners(forest.trees, forest.terms, 2, halves, COSTS)
    assert all(set(owner[half]) == {0, 1} for half in halves)
    parts = [rank_part(forest.trees, forest.terms, owner, rank) for rank in range(2)]
    assert sorted(np.concatenate([rows for *_, rows in parts])) == list(range(len(forest.terms)))
    for trees, terms, rows in parts:
        np.testing.assert_array_equal(terms.token, forest.terms.token[rows])
        assert all(len(trees[number]) for number in np.unique(terms.tree))


def test_what_is_exchanged_evens_out_what_the_largest_first_leaves():
    work = np.array([5.0, 4.0, 3.0, 3.0, 3.0])
    load = np.bincount(assign_balanced(work, 2), work)
    assert sorted(load) == [9.0, 9.0]


def test_fewer_trees_than_ranks_and_trees_without_terms():
    forest = build_token_trees(ragged(np.random.default_rng(1), 2, 2))
    none = forest.terms.pick(np.zeros(0, dtype=int))
    assert len(tree_owners(forest.trees, none, 4, [np.arange(2)], COSTS)) == 2
    assert len(set(tree_owners(forest.trees, forest.terms, 4, [np.arange(2)], COSTS))) == 2
