"""Some branches stand for all: what is expected to be learned does not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms.weights import WEIGHTS
from arborl.rollout.thin import factors, thin
from arborl.rollout.tree import plant
from arborl.seeds import generator
from arborl.types import Call, Completion, Episode, Finish, Group, Task, Terms


def made(prompt, sampled, turn=0):
    return Call(tuple(prompt), Completion(tuple(sampled), (-1.0,) * len(sampled), Finish.STOP), turn)


def episode(name, branches, calls=2, first=10):
    """Branches that share a beginning; each call of one goes on from the last."""
    made_calls = []
    for branch in range(branches):
        context = [1, 2, first + branch]
        for number in range(calls):
            sampled = [50 + branch, 60 + number, 70][: 1 + (branch + number) % 3]
            made_calls.append(made(context, sampled))
            context = [*context, *sampled, 9]
    return Episode(name, Task("t"), calls=made_calls, rewards={"r": 1.0})


def credited(groups, aggregation="episode"):
    forest = plant(groups)
    columns = {name: getattr(forest.terms, name) for name in Terms.__slots__}
    columns["weight"] = WEIGHTS[aggregation](forest.terms, 16)
    columns["advantage"] = np.arange(len(forest.terms), dtype=float)
    return Terms(**columns)


def test_a_call_is_in_the_branch_it_goes_on_from_and_a_return_begins_another():
    grows = [made([1], [2]), made([1, 2, 3], [4]), made([1, 2, 3, 4, 5], [6])]
    assert Episode("e", Task("t"), calls=grows).branches == [0, 0, 0]
    edited = [*grows[:2], made([1, 2, 8], [4]), made([1, 2, 8, 4, 5], [6])]  # the second answer was deleted
    assert Episode("e", Task("t"), calls=edited).branches == [0, 0, 1, 1]
    assert Episode("e", Task("t"), calls=[made([1], [2]), made([7], [2]), made([1, 2, 3], [4])]).branches == [
        1,
        0,
        1,
    ]  # the last call's is last


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 10**6))
def test_a_branch_that_is_kept_stands_for_its_chance_of_being_kept(branches, most, seed):
    draws = [factors(branches, [3] * branches, most, "random", generator(seed, i)) for i in range(40)]
    kept = np.array(draws)
    assert np.all((kept > 0).sum(axis=1) == min(branches, most))
    if 1 < most < branches:
        assert np.all(kept[:, -1] == 1.0)  # always there, so it stands for itself
        others = np.unique(kept[:, :-1][kept[:, :-1] > 0])
        assert others.tolist() == [(branches - 1) / (most - 1)]  # one over the chance of being drawn


def test_the_expected_weight_of_every_branch_is_its_own():
    for branches, most in ((5, 1), (5, 3), (6, 2)):
        mean = np.mean(
            [factors(branches, [1] * branches, most, "random", generator(7, i)) for i in range(6000)], axis=0
        )
        assert np.allclose(mean, 1.0, atol=0.1)


@pytest.mark.parametrize("aggregation", ["episode", "token", "fixed"])
def test_neither_branches_nor_drawing_change_the_weight_of_an_episode(aggregation):
    groups = [Group(Task("t"), [episode("a", 6), episode("b", 1), episode("c", 3, first=30)])]
    terms = credited(groups, aggregation)
    whole = np.bincount(terms.episode, terms.weight)
    last = thin(groups, terms, 2, "last", seed=0)[1]
    assert np.allclose(np.bincount(last.episode, last.weight), whole)
    total = np.mean(
        [
            np.bincount(t.episode, t.weight, minlength=3)
            for t in (thin(groups, terms, 2, "random", s)[1] for s in range(400))
        ],
        axis=0,
    )
    assert np.allclose(total, whole, rtol=0.1)
    if aggregation == "episode":
        assert np.allclose(whole, 1 / 3)


def test_the_expected_gradient_is_that_of_all_branches():
    """With the gradient of each term a fixed vector, the mean over draws of the weighted sum is the whole sum."""
    groups = [Group(Task("t"), [episode("a", 5)])]
    terms = credited(groups)
    gradient = generator(3, "g").normal(size=(200, 4))

    def total(of):
        return (of.weight[:, None] * of.advantage[:, None] * gradient[of.token]).sum(axis=0)

    drawn = np.mean([total(thin(groups, terms, 3, "random", seed)[1]) for seed in range(3000)], axis=0)
    assert np.allclose(drawn, total(terms), atol=0.1 * np.abs(total(terms)).max())


def test_what_is_kept_is_in_its_own_context_with_its_own_credit():
    groups = [Group(Task("t"), [episode("a", 4), episode("b", 2, first=30)])]
    terms = credited(groups)
    forest, kept = thin(groups, terms, 1, "last", seed=0)
    assert len(kept) < len(terms)
    assert sum(len(tree) for tree in forest.trees) < sum(len(tree) for tree in plant(groups).trees)
    for row in range(len(kept)):
        tree, at = forest.trees[int(kept.tree[row])], int(kept.position[row])
        context = [int(tree.tokens[k]) for k in range(at + 1) if k <= at < tree.end[k]]
        assert any(
            call.prompt + call.completion.tokens[:n] == tuple(context) and call.completion.tokens[n] == kept.token[row]
            for e in groups[0].episodes
            for call in e.calls
            for n in range(len(call.completion.tokens))
        )
    assert set(kept.advantage) <= set(terms.advantage)


def test_few_branches_are_left_alone_and_nonsense_is_refused():
    groups = [Group(Task("t"), [episode("a", 2)])]
    terms = credited(groups)
    _, same = thin(groups, terms, 2, "random", seed=0)
    assert np.array_equal(same.weight, terms.weight)
    assert np.array_equal(same.position, terms.position)
    for args, words in (((0, "last"), "most=0"), ((1, "first"), "how='first'")):
        with pytest.raises(ValueError, match=words):
            thin(groups, terms, *args, seed=0)
    assert len(thin([], credited([]), 1, "last", seed=0)[1]) == 0
