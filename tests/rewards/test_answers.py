"""Answers: numbers, texts and tags as models write them."""

import asyncio
import re
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.envs.env import parse_answer
from arborl.rewards import REWARDS
from arborl.rewards.answers import (
    Equal,
    ShortAnswer,
    environment,
    equal,
    exact,
    final_part,
    last_boxed,
    last_number,
    last_tagged,
    read_number,
    same_answer,
)
from arborl.rewards.code_tests import final_code
from arborl.types import Episode, Message, StopReason, Task, Turn


def score(text, answer, **args):
    episode = Episode("e", Task("t", fields={"answer": answer}), turns=[Turn(Message("assistant", text))])
    return asyncio.run(Equal(**args)(episode))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72), ("-3", -3), ("−3", -3), ("+3", 3), ("72.5", Fraction(145, 2)), (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)), ("3.", 3), ("1,000", 1000), ("1,234,567.50", Fraction(2469135, 2)),
        ("1 000 000", 1_000_000), ("1\u202f000", 1000), ("1_000", 1000), ("1{,}000", 1000), ("$12", 12),
        ("-$12.50", Fraction(-25, 2)), ("\\$12", 12), ("12 €", 12), ("3/4", Fraction(3, 4)), ("-3/4", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)), ("\\frac{3}{4}", Fraction(3, 4)), ("\\dfrac{-3}{4}", Fraction(-3, 4)),
        ("1\\frac{1}{2}", Fraction(3, 2)), ("1.5e3", 1500), ("2\\times 10^{3}", 2000), ("2×10^3", 2000),
        ("1,00", None), ("1,0000", None), ("12,34,567", None), ("1/0", None), ("1e999999999", None),
        ("9" * 1000, None), ("12 apples", None), ("3, 4", None), ("", None), ("-", None), ("e5", None),
    ],
)  # fmt: skip
def test_a_number_is_read_however_it_is_written(text, value):
    read = read_number(text)
    assert (read.value if read else None) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She sold 72 clips.", 72), ("48 + 24 = 72", 72), ("x = -3", -3), ("10-3", 3),
        ("It costs $1,250.75 in all.", Fraction(5003, 4)), ("day 2 5 apples", 5), ("no number", None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, value):
    read = last_number(text)
    assert (read.value if read else None) == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("<answer>41</answer> no <answer>\n42\n</answer>", "42"), ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"), ("<answer>it is \\boxed{7}</answer>", "7"), ("long\n#### 72", "72"),
        ("The answer is 42. I am sure about it", "42. I am sure about it"), ("Final answer: 12\nThanks!", "12"),
        ("a\n\nb\n", "b"), ("\\boxed{open", "\\boxed{open"), ("", ""),
    ],
)  # fmt: skip
def test_where_an_answer_is_found(text, part):
    assert final_part(text) == part


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("It is 72.", "72", 1), ("It is 72.5", "5", 0), ("It is -3", "3", 0), ("It is 1,000", "000", 0),
        ("It is 1,000", "1000", 1), ("\\boxed{0.75}", "3/4", 1), ("\\boxed{75\\%}", "0.75", 1), ("75%", "75", 1),
        ("0.75", "75%", 1), ("0.75", "75", 0), ("72", "She sold 72.\n#### 72", 1),
        ("<answer>Paris.</answer>", "paris", 1), ("<answer>\\text{Paris}</answer>", "Paris", 1),
        ("<answer>Lyon</answer>", "Paris", 0), ("<answer>42</answer>", 42, 1), ("<answer>42.0</answer>", 42, 1),
        ("<answer>NYC</answer>", ["New York", "NYC"], 1), ("", "42", 0), ("no number", "42", 0),
    ],
)  # fmt: skip
def test_equality_of_answers(text, answer, value):
    assert score(text, answer) == value


def test_tolerance_is_a_share_of_the_right_number():
    assert score("3.14", "3.14159", tolerance=0.001) == 1
    assert score("3.1", "3.14159", tolerance=0.001) == 0
    assert score("0.0005", "0", tolerance=0.001) == 1
    with pytest.raises(ValueError, match="tolerance=2"):
        Equal(tolerance=2)


def test_a_missing_field_is_named():
    with pytest.raises(LookupError, match="reward 'equal' needs the field 'gold'; task 't' has: answer"):
        score("1", "1", field="gold")
    assert REWARDS["equal"] is Equal


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4))
def test_every_decimal_is_read_exactly_with_and_without_thousands(number):
    for text in (f"{number:f}", f"{number:,f}", f"\\boxed{{{number:,f}}}", f"so it is {number:f}"):
        read = last_number(text)
        assert read is not None
        assert read.value == Fraction(Decimal(number))


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_every_fraction_is_read_exactly(top, bottom):
    assert read_number(f"{top}/{bottom}").value == Fraction(top, bottom)
    assert read_number(f"\\frac{{{top}}}{{{bottom}}}").value == Fraction(top, bottom)


PIECES = st.sampled_from(
    ["1", "23", ",", ".", "-", " ", "/", "e", "%", "\\frac{", "}{", "}", "$", "\\boxed{", "×10^", "a"]
)


@given(st.text() | st.lists(PIECES).map("".join), st.text() | st.lists(PIECES).map("".join))
def test_any_two_texts_can_be_compared(a, b):
    assert equal(final_part(a), final_part(b)) in (True, False)
    last_boxed(a)


def test_no_text_takes_long():
    start = time.thread_time()
    for piece in ("9", "1,", "1 ", "1/", "\\frac{", "\\boxed{", "{", "1e", "-", "$", "1 1/", ".1", "answer is "):
        final_part(piece * 20_000)
        last_number(piece * 20_000)
        read_number(piece * 20_000)
    assert time.thread_time() - start < 5


def test_the_environments_reward_is_the_sum_over_turns():
    turns = [Turn(Message("assistant", "x"), reward=value) for value in (0.5, -0.25, 1.0)]
    assert asyncio.run(environment(Episode("e", Task("t"), turns=turns))) == 1.25
    assert REWARDS["env"] is environment


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("<answer>42</answer>", "42", 1.0), ("<answer>41</answer> no, <answer> 42\n</answer> it is", "42", 1.0),
        ("<answer>42</answer> no, <answer>41</answer>", "42", 0.0), ("Let me think.\n42\n\n", "42", 1.0),
        ("It is 42", "42", 0.0), ("<answer>New  York</answer>", "New York", 1.0),
        ("<answer>new york</answer>", "New York", 0.0), ("<answer>42.0</answer>", 42, 1.0),
        ("<answer>1,000</answer>", "1000", 1.0), ("<answer>1,00</answer>", "100", 0.0),
        ("<answer>nan</answer>", float("inf"), 0.0), ("<answer>9007199254740993</answer>", 9007199254740992, 0.0),
        ("<answer>1e999999999</answer>", "1", 0.0), ("", "42", 0.0),
    ],
)  # fmt: skip
def test_exact_compares_the_final_answer(text, answer, value):
    episode = Episode("e", Task("t", fields={"answer": answer}), turns=[Turn(Message("assistant", text))])
    assert asyncio.run(exact(episode)) == value


@given(st.integers(), st.integers())
def test_numbers_are_equal_exactly_when_they_are(a, b):
    assert same_answer(f"{a:,}", f"{b}.00") == (a == b)


@given(st.text(), st.text())
def test_any_text_can_be_compared(a, b):
    assert same_answer(final_part(a), b) in (True, False)
    assert same_answer(a, a)


PARTS = st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", "<", "a>", "\n"]), max_size=12)


@given(PARTS)
def test_the_last_tagged_text_is_that_of_the_usual_expression(parts):
    text = "".join(parts)
    both = re.findall(r"<(a|b)>(.*?)</\1>", text, re.DOTALL)
    one = re.findall(r"<a>(.*?)</a>", text, re.DOTALL)
    assert last_tagged(text, "a", "b") == (both[-1][1] if both else None)
    assert last_tagged(text, "a") == (one[-1] if one else None)


def test_tags_that_are_never_closed_are_read_in_one_pass():
    """By an expression that looks for the end of each tag, this takes minutes."""
    text = "<answer><code>" * 70_000 + "\n42"
    assert final_part(text) == "42"
    assert final_code(text) == text
    assert parse_answer(text) is None
    assert parse_answer(text + "</answer>") is not None


# ---------------------------------------------------------------------------------------- required calls and messages


def worth(reward, answer, calls=0, **metrics):
    one = Episode("e", Task("t", fields={"answer": "42"}), turns=[Turn(Message("assistant", answer))])
    one.metrics |= {"tool/calls": float(calls)} | {f"tool/{key}": value for key, value in metrics.items()}
    return asyncio.run(reward(one))


def test_an_answer_without_the_required_tool_call_has_the_value_unmet_even_if_it_is_right():
    reward = Equal(min_tool_calls=1, wrong=0.1)
    assert [worth(reward, answer, calls) for calls in (0, 1) for answer in ("42", "41")] == [0.0, 0.0, 1.0, 0.1]
    assert worth(Equal(min_tool_calls=1, unmet=-1.0), "42") == -1.0
    assert worth(reward, "42", 1, unknown_tool=1.0) == worth(reward, "42", 1, malformed=1.0) == 0.0
    assert worth(reward, "42", 1, failed=1.0, exception=1.0) == 1.0  # the tool was called


def test_a_required_message_counts_before_every_penalty():
    reward = ShortAnswer(last_pattern="<answer>", unmet=0.25)
    assert (worth(reward, "<answer>42</answer>"), worth(reward, "42")) == (1.0, 0.25)
    empty = Episode("e", Task("t", fields={"answer": "42"}), stop=StopReason.MAX_TURNS)
    assert asyncio.run(reward(empty)) == 0.25


@pytest.mark.parametrize("reward", [Equal, ShortAnswer])
def test_wrong_requirements_are_refused_by_name(reward):
    with pytest.raises(ValueError, match=r"last_pattern='\(' is not a regular expression"):
        reward(last_pattern="(")
    with pytest.raises(ValueError, match="min_tool_calls=-1"):
        reward(min_tool_calls=-1)
