"""Some branches stand for all: what is expected to be learned does not change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms.loss_table import WEIGHTS
from arborl.rollout.token_trees import branch_factors, build_token_trees, downsample_branches
from arborl.seeds import generator
from arborl.types import Call, Completion, Episode, FinishReason, Group, Task, Terms


def made(prompt, sampled, turn=0):
    return Call(tuple(prompt), Completion(tuple(sampled), (-1.0,) * len(sampled), FinishReason.STOP), turn)


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
    forest = build_token_trees(groups)
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
    draws = [branch_factors([0.3] * branches, most, "random", generator(seed, i)) for i in range(40)]
    kept = np.array(draws)
    assert np.all((kept > 0).sum(axis=1) == min(branches, most))
    if 1 < most < branches:
        assert np.all(kept[:, -1] == 1.0)  # always there, so it stands for itself
        others = np.unique(kept[:, :-1][kept[:, :-1] > 0])
        assert others.tolist() == [(branches - 1) / (most - 1)]  # one over the chance of being drawn


def test_the_expected_weight_of_every_branch_is_its_own():
    for branches, most in ((5, 1), (5, 3), (6, 2)):
        mean = np.mean([branch_factors([1.0] * branches, most, "random", generator(7, i)) for i in range(6000)], axis=0)
        assert np.allclose(mean, 1.0, atol=0.1)


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_neither_branches_nor_drawing_change_the_weight_of_an_episode(aggregation):
    groups = [Group(Task("t"), [episode("a", 6), episode("b", 1), episode("c", 3, first=30)])]
    terms = credited(groups, aggregation)
    whole = np.bincount(terms.episode, terms.weight)
    for most in (1, 2, 5):
        last = downsample_branches(groups, terms, most, "last", seed=0)[1]
        assert np.allclose(np.bincount(last.episode, last.weight), whole)
    total = np.mean(
        [
            np.bincount(t.episode, t.weight, minlength=3)
            for t in (downsample_branches(groups, terms, 2, "random", s)[1] for s in range(400))
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

    drawn = np.mean([total(downsample_branches(groups, terms, 3, "random", seed)[1]) for seed in range(3000)], axis=0)
    assert np.allclose(drawn, total(terms), atol=0.1 * np.abs(total(terms)).max())


def test_what_is_kept_is_in_its_own_context_with_its_own_credit():
    groups = [Group(Task("t"), [episode("a", 4), episode("b", 2, first=30)])]
    terms = credited(groups)
    forest, kept, dropped = downsample_branches(groups, terms, 1, "last", seed=0)
    assert dropped == {"rollout/downsampled_branches": 3 + 1, "rollout/downsampled_terms": len(terms) - len(kept)}
    assert len(kept) < len(terms)
    assert sum(len(tree) for tree in forest.trees) < sum(len(tree) for tree in build_token_trees(groups).trees)
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
    _, same, dropped = downsample_branches(groups, terms, 2, "random", seed=0)
    assert dropped == {"rollout/downsampled_branches": 0, "rollout/downsampled_terms": 0}
    assert np.array_equal(same.weight, terms.weight)
    assert np.array_equal(same.position, terms.position)
    for args, words in (((0, "last"), "most=0"), ((1, "first"), "how='first'")):
        with pytest.raises(ValueError, match=words):
            downsample_branches(groups, terms, *args, seed=0)
    assert len(downsample_branches([], credited([]), 1, "last", seed=0)[1]) == 0


PLACED = {"tree", "position", "call", "weight"}


@pytest.mark.parametrize("how", ["last", "random"])
def test_every_column_but_place_and_weight_goes_with_its_term(how):
    """Log-probabilities of policy and reference, values, targets, versions: each row is reported by its advantage."""
    groups = [Group(Task("t"), [episode("a", 4), episode("b", 2, first=30)]), Group(Task("u"), [episode("c", 5)])]
    terms = credited(groups)
    filled = {
        name: np.arange(len(terms)) + 0.1 * n
        for n, name in enumerate(("proximal", "reference", "value", "target", "after", "teacher"))
    }
    masks = np.array([bytes([number]) for number in range(len(terms))], dtype=object)
    terms = dataclasses.replace(terms, **filled, drawn=np.arange(4.0 * len(terms)).reshape(-1, 4), allowed=masks)
    forest, kept, _ = downsample_branches(groups, terms, 2, how, seed=1)
    rows = kept.advantage.astype(int)  # counts the terms
    assert 0 < len(rows) < len(terms)
    for name in set(Terms.__slots__) - PLACED:
        assert np.array_equal(getattr(kept, name), getattr(terms, name)[rows]), name
    assert np.all(kept.weight >= terms.weight[rows])
    assert kept.tree.tolist() == [0 if one < 2 else 1 for one in kept.episode]
    for row in range(len(kept)):
        assert (
            forest.trees[int(kept.tree[row])].tokens[int(kept.position[row])]
            == (build_token_trees(groups).trees[int(terms.tree[rows[row]])].tokens[int(terms.position[rows[row]])])
        )


@pytest.mark.parametrize("how", ["last", "random"])
def test_an_episode_is_thinned_alike_whatever_is_beside_it(how):
    """So two processes with half the groups each train on what one with all of them does."""
    groups = [Group(Task(f"t{n}"), [episode(f"{n}{e}", 2 + e, first=10 * e) for e in range(3)]) for n in range(4)]
    terms = credited(groups)
    whole = downsample_branches(groups, terms, 2, how, seed=5)[1]
    for mine in ([0, 1], [2, 3], [1]):
        first = sum(len(e.calls) for group in groups[: mine[0]] for e in group.valid_episodes)
        own = terms.pick(np.flatnonzero(np.isin(terms.tree, mine)))
        own = dataclasses.replace(own, tree=own.tree - mine[0], call=own.call - first)
        part = downsample_branches([groups[n] for n in mine], own, 2, how, seed=5)[1]
        same = whole.pick(np.flatnonzero(np.isin(whole.tree, mine)))
        for name in ("token", "position", "advantage", "weight", "episode"):
            assert np.array_equal(getattr(part, name), getattr(same, name)), name
    assert not np.array_equal(
        downsample_branches(groups, terms, 2, "random", 5)[1].advantage,
        downsample_branches(groups, terms, 2, "random", 6)[1].advantage,
    )


@pytest.mark.parametrize("how", ["last", "random"])
def test_a_branch_that_sampled_nothing_is_not_one_of_those_kept(how):
    one = episode("a", 3)
    one.calls.append(made([8, 8], []))  # cut off before its first token
    groups = [Group(Task("t"), [one])]
    terms = credited(groups)
    _, kept, dropped = downsample_branches(groups, terms, 1, how, seed=0)
    assert len(kept) > 0
    assert dropped["rollout/downsampled_branches"] == 2
    if how == "last":
        assert kept.weight.sum() == pytest.approx(terms.weight.sum())
    assert len(downsample_branches([Group(Task("t"), [Episode("e", Task("t"))])], credited([]), 1, how, seed=0)[1]) == 0


def test_branches_without_weight_are_kept_without_any():
    assert branch_factors([1.0, 0.0], 1, "last", generator(0)).tolist() == [0.0, 1.0]
