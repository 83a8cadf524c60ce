import asyncio
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.rewards import REWARDS
from arborl.rewards.answers import Equal, equal, final_part, last_boxed, last_number, read_number
from arborl.types import Episode, Message, Task, Turn


def score(text, answer, **args):
    episode = Episode("e", Task("t", fields={"answer": answer}), turns=[Turn(Message("assistant", text))])
    return asyncio.run(Equal(**args)(episode))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("-3", -3),
        ("−3", -3),
        ("+3", 3),
        ("72.5", Fraction(145, 2)),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("3.", 3),
        ("1,000", 1000),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("1 000 000", 1_000_000),
        ("1\u202f000", 1000),
        ("1_000", 1000),
        ("1{,}000", 1000),
        ("$12", 12),
        ("-$12.50", Fraction(-25, 2)),
        ("\\$12", 12),
        ("12 €", 12),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("\\dfrac{-3}{4}", Fraction(-3, 4)),
        ("1\\frac{1}{2}", Fraction(3, 2)),
        ("1.5e3", 1500),
        ("2\\times 10^{3}", 2000),
        ("2×10^3", 2000),
        ("1,00", None),
        ("1,0000", None),
        ("12,34,567", None),
        ("1/0", None),
        ("1e999999999", None),
        ("9" * 1000, None),
        ("12 apples", None),
        ("3, 4", None),
        ("", None),
        ("-", None),
        ("e5", None),
    ],
)
def test_a_number_is_read_however_it_is_written(text, value):
    read = read_number(text)
    assert (read.value if read else None) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She sold 72 clips.", 72),
        ("48 + 24 = 72", 72),
        ("x = -3", -3),
        ("10-3", 3),  # a difference, not a negative number
        ("It costs $1,250.75 in all.", Fraction(5003, 4)),
        ("day 2 5 apples", 5),
        ("no number", None),
    ],
)
def test_the_last_number_of_a_text(text, value):
    read = last_number(text)
    assert (read.value if read else None) == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("<answer>41</answer> no <answer>\n42\n</answer>", "42"),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("<answer>it is \\boxed{7}</answer>", "7"),
        ("long\n#### 72", "72"),
        ("The answer is 42. I am sure about it", "42. I am sure about it"),
        ("Final answer: 12\nThanks!", "12"),
        ("a\n\nb\n", "b"),
        ("\\boxed{open", "\\boxed{open"),
        ("", ""),
    ],
)
def test_where_an_answer_is_found(text, part):
    assert final_part(text) == part


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("It is 72.", "72", 1),
        ("It is 72.5", "5", 0),
        ("It is -3", "3", 0),
        ("It is 1,000", "000", 0),
        ("It is 1,000", "1000", 1),
        ("\\boxed{0.75}", "3/4", 1),
        ("\\boxed{75\\%}", "0.75", 1),
        ("75%", "75", 1),
        ("0.75", "75%", 1),
        ("0.75", "75", 0),
        ("72", "She sold 72.\n#### 72", 1),
        ("<answer>Paris.</answer>", "paris", 1),
        ("<answer>\\text{Paris}</answer>", "Paris", 1),
        ("<answer>Lyon</answer>", "Paris", 0),
        ("<answer>42</answer>", 42, 1),
        ("<answer>42.0</answer>", 42, 1),
        ("<answer>NYC</answer>", ["New York", "NYC"], 1),
        ("", "42", 0),
        ("no number", "42", 0),
    ],
)
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
