"""Law 1: every sampled token is exactly one term, in exactly the context it was sampled in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.rollout.token_trees import build_token_trees, tree_of_sequences
from arborl.types import Call, Completion, Episode, Failure, FinishReason, Group, Task, TokenTree

TOKEN = st.integers(0, 5)  # few tokens, so that prefixes are shared by chance


def call(prompt: list[int], sampled: list[int], turn: int = 0) -> Call:
    logprobs = tuple(-0.1 * (i + 1) for i in range(len(sampled)))
    return Call(tuple(prompt), Completion(tuple(sampled), logprobs, FinishReason.STOP, version=3), turn)


@st.composite
def episodes(draw: st.DrawFn, number: int = 0) -> Episode:
    """Calls that extend, branch off or edit what came before, as any agent might."""
    calls: list[Call] = []
    context = draw(st.lists(TOKEN, min_size=1, max_size=4))
    for turn in range(draw(st.integers(1, 4))):
        sampled = draw(st.lists(TOKEN, min_size=1, max_size=4))
        calls.append(call(context, sampled, turn))
        match draw(st.sampled_from(["extend", "edit", "again", "fresh"])):
            case "extend":
                context = context + sampled + draw(st.lists(TOKEN, max_size=3))
            case "edit":
                context = context[: draw(st.integers(1, len(context)))] + draw(st.lists(TOKEN, max_size=3))
            case "fresh":
                context = draw(st.lists(TOKEN, min_size=1, max_size=4))
    return Episode(f"e{number}", Task("t"), calls=calls)


GROUPS = st.lists(
    st.lists(episodes(), min_size=1, max_size=4).map(lambda e: Group(Task("t"), e)), min_size=1, max_size=3
)


def ancestors(tree: TokenTree, place: int) -> list[int]:
    """What the token at `place` sees, itself included, by the tree's own rule."""
    return [int(tree.tokens[k]) for k in range(place + 1) if place < tree.end[k]]


@given(GROUPS)
def test_every_sampled_token_is_one_term_in_the_context_it_was_sampled_in(groups: list[Group]):
    forest = build_token_trees(groups)
    expected = [
        (g, [*c.prompt, *c.completion.tokens[:i]], token, c.completion.logprobs[i], c.turn, 3)
        for g, group in enumerate(groups)
        for episode in group.episodes
        for c in episode.calls
        for i, token in enumerate(c.completion.tokens)
    ]
    terms = forest.terms
    got = [
        (
            int(terms.tree[i]),
            ancestors(forest.trees[terms.tree[i]], int(terms.position[i])),
            int(terms.token[i]),
            float(terms.logprob[i]),
            int(terms.turn[i]),
            int(terms.version[i]),
        )
        for i in range(len(terms))
    ]
    assert got == expected


@given(GROUPS)
def test_episodes_and_calls_are_numbered_through_the_whole_batch(groups: list[Group]):
    terms = build_token_trees(groups).terms
    sizes = [len(c.completion.tokens) for group in groups for e in group.episodes for c in e.calls]
    assert terms.call.tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
    per_episode = [e.sampled for group in groups for e in group.episodes]
    assert terms.episode.tolist() == np.repeat(np.arange(len(per_episode)), per_episode).tolist()


@given(st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_tree_holds_each_prefix_once_and_does_not_depend_on_order(sequences: list[list[int]], shuffle):
    tree, paths = tree_of_sequences(sequences)
    prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert len(tree) == len(prefixes)
    assert {tuple(ancestors(tree, place)) for place in range(len(tree))} == prefixes
    for sequence, path in zip(sequences, paths, strict=True):
        assert tree.tokens[path].tolist() == list(sequence)
        assert tree.depth[path].tolist() == list(range(len(sequence)))
    shuffle.shuffle(sequences)
    again, _ = tree_of_sequences(sequences)
    assert (again.tokens.tolist(), again.end.tolist()) == (tree.tokens.tolist(), tree.end.tolist())


def test_the_example_of_the_module():
    tree, _ = tree_of_sequences([[1, 2, 3, 4], [1, 2, 5]])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5]
    assert tree.depth.tolist() == [0, 1, 2, 3, 2]
    assert tree.end.tolist() == [5, 5, 4, 4, 5]


def test_a_failed_episode_is_not_in_the_tree_and_has_no_term():
    good = Episode("good", Task("t"), calls=[call([1, 2], [3])])
    bad = Episode("bad", Task("t"), calls=[call([1, 2], [4])], failure=Failure("environment 'x'", "ValueError", "boom"))
    forest = build_token_trees([Group(Task("t"), [bad, good])])
    assert forest.trees[0].tokens.tolist() == [1, 2, 3]
    assert forest.terms.token.tolist() == [3]
    assert forest.terms.episode.tolist() == [0]


def test_an_append_only_conversation_counts_as_one_row_and_an_edited_one_as_two():
    append_only = Episode("a", Task("t"), calls=[call([1], [2]), call([1, 2, 3], [4])])
    edited = Episode("b", Task("t"), calls=[call([1], [2]), call([1, 3], [4])])
    assert build_token_trees([Group(Task("t"), [append_only])]).raw_tokens == 4
    assert build_token_trees([Group(Task("t"), [edited])]).raw_tokens == 2 + 3


def test_a_call_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        build_token_trees([Group(Task("t"), [Episode("a", Task("t"), calls=[call([], [2])])])])
