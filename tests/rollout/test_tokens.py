"""Token ids that grow: to who looks they are tuples, and conversations that go on from each other are one line."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.tokens import Tokens

IDS = st.lists(st.integers(0, 3), max_size=6)


def ids(*some: int) -> tuple[int, ...]:
    return some


@given(st.data())
def test_whatever_is_extended_cut_and_joined_in_whatever_order_nothing_made_before_changes(data):
    made: list[tuple[Tokens, tuple[int, ...]]] = [(Tokens(), ()), (Tokens([1, 2]), (1, 2))]
    for _ in range(data.draw(st.integers(1, 12))):
        tokens, same = made[data.draw(st.integers(0, len(made) - 1))]
        if data.draw(st.booleans()):
            end = data.draw(st.integers(0, 12))
            made.append((tokens[:end], same[:end]))
        else:
            more, plain = data.draw(st.sampled_from(made) | IDS.map(lambda ids: (ids, tuple(ids))))
            made.append((tokens + more, same + plain))
    for tokens, same in made:
        assert tokens == same
        assert same == tokens
        assert hash(tokens) == hash(same)
        assert list(tokens) == list(same) == np.asarray(tokens).tolist()
        assert [tokens[i] for i in range(-len(tokens), len(tokens))] == [*same, *same]
        for begin, end in ((1, None), (-2, None), (1, -1), (None, -1), (3, 1)):
            assert tokens[begin:end] == same[begin:end]
        assert tokens[::-1] == same[::-1]
        for other, also in made:
            assert (tokens == other) is (same == also)
            assert (tokens < other) is (tokens < also) is (same < other) is (same < also)
            assert tokens.begins(other) is (also[: len(same)] == same)
            shared = tokens.common(other)
            assert same[:shared] == also[:shared]
            assert same == also or same[: shared + 1] != also[: shared + 1]


def test_what_goes_on_from_an_end_or_along_what_is_there_shares_its_line_and_what_turns_off_does_not():
    prompt = Tokens([1, 2, 3])
    whole = prompt + ids(4, 5)
    later = whole + ids(6)
    assert prompt.line is whole.line is later.line
    assert (prompt + ids(4)).line is prompt.line  # there already
    assert (prompt + ids(4, 5, 6, 7)).line is prompt.line  # there in part
    other = prompt + ids(4, 9)
    assert other.line is not prompt.line
    assert (tuple(other), tuple(later)) == ((1, 2, 3, 4, 9), (1, 2, 3, 4, 5, 6))
    assert (Tokens() + prompt).line is prompt.line
    assert (Tokens() + ids(1)).line is not (Tokens() + ids(1)).line  # the empty one is no one's


def test_no_one_can_write_into_them_and_they_stay_where_they_were_looked_at():
    tokens = Tokens([1, 2, 3])
    seen = tokens.array
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 9
    given_ids = np.array([7, 8], dtype=np.int32)
    longer = tokens + given_ids.tolist()
    copied = Tokens(given_ids)
    given_ids[0] = 0
    for _ in range(200):
        longer = longer + ids(4)
    assert (seen.tolist(), copied, longer[:5]) == ([1, 2, 3], (7, 8), (1, 2, 3, 7, 8))


def test_sent_together_they_are_sent_once():
    prompts = [Tokens(range(1000))]
    for turn in range(50):
        prompts.append(prompts[-1] + [turn] * 100)
    sent = pickle.dumps(prompts)
    assert len(sent) < 2 * 4 * len(prompts[-1])
    back = pickle.loads(sent)
    assert back == prompts
    assert len({id(one.line) for one in back}) == 1
    assert back[3] + [5] == prompts[3] + [5]
    assert copy.deepcopy(prompts) == prompts


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], ["a"], [[1]], [True], [None]])
def test_what_is_no_token_id_is_refused(ids):
    for make in (Tokens, Tokens([1]).__add__):
        with pytest.raises(ValueError, match="token ids are whole numbers"):
            make(ids)


def test_people_are_shown_the_beginning():
    assert repr(Tokens([1, 2])) == "Tokens([1, 2])"
    assert repr(Tokens(range(100))) == "Tokens([0, 1, 2, 3, 4, 5, 6, 7, …], 100 of them)"
