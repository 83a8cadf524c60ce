import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.rewards import REWARDS
from arborl.rewards.answers import environment, exact, final_part, same_answer
from arborl.types import Episode, Message, Task, Turn


def test_the_environments_reward_is_the_sum_over_turns():
    turns = [Turn(Message("assistant", "x"), reward=value) for value in (0.5, -0.25, 1.0)]
    assert asyncio.run(environment(Episode("e", Task("t"), turns=turns))) == 1.25
    assert REWARDS["env"] is environment


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("<answer>42</answer>", "42", 1.0),
        ("<answer>41</answer> no, <answer> 42\n</answer> it is", "42", 1.0),
        ("<answer>42</answer> no, <answer>41</answer>", "42", 0.0),
        ("Let me think.\n42\n\n", "42", 1.0),
        ("It is 42", "42", 0.0),
        ("<answer>New  York</answer>", "New York", 1.0),
        ("<answer>new york</answer>", "New York", 0.0),
        ("<answer>42.0</answer>", 42, 1.0),
        ("<answer>1,000</answer>", "1000", 1.0),
        ("<answer>1,00</answer>", "100", 0.0),
        ("<answer>nan</answer>", float("inf"), 0.0),
        ("<answer>9007199254740993</answer>", 9007199254740992, 0.0),
        ("<answer>1e999999999</answer>", "1", 0.0),
        ("", "42", 0.0),
    ],
)
def test_exact_compares_the_final_answer(text, answer, value):
    episode = Episode("e", Task("t", fields={"answer": answer}), turns=[Turn(Message("assistant", text))])
    assert asyncio.run(exact(episode)) == value


def test_no_turn_at_all_is_no_answer():
    assert asyncio.run(exact(Episode("e", Task("t", fields={"answer": "42"})))) == 0.0


@given(st.integers(), st.integers())
def test_numbers_are_equal_exactly_when_they_are(a, b):
    assert same_answer(f"{a:,}", f"{b}.00") == (a == b)


@given(st.text(), st.text())
def test_any_text_can_be_compared(a, b):
    assert same_answer(final_part(a), b) in (True, False)
    assert same_answer(a, a)
