"""Arithmetic problems, made from a seed: nothing is downloaded, and every answer is computed.

`arborl data make arithmetic` writes files of them; a scripted player can read the expression that solves each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from arborl.seeds import generator

Chance = np.random.Generator
ASKED = "Answer as <answer>number</answer>."
NAMES = ("Tom", "Ann", "Max", "Eva", "Ben", "Mia", "Sam", "Lea")
THINGS = ("apples", "pens", "cards", "eggs", "stones", "books", "coins", "shells")


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    """A question and what solves it."""

    question: str
    expression: str
    """What to ask a calculator."""
    answer: str


def problem(chance: Chance, level: int = 1) -> ArithmeticProblem:
    """One problem. Level 1 takes one operation on numbers below 100, level 2 two, level 3 also division and percent.

    Example:
        problem(generator(0, "example"))
        # ArithmeticProblem("Of 52 eggs, 17 break. How many are left? Answer as …", "52 - 17", "35")
    """
    if level not in LEVELS:
        raise ValueError(f"level={level}: give 1, 2 or 3")
    makers = LEVELS[level]
    text, expression, value = makers[int(chance.integers(len(makers)))](chance)
    return ArithmeticProblem(f"{text} {ASKED}", expression, show(value))


def problems(count: int, seed: int = 0, level: int = 1) -> list[dict[str, Any]]:
    """Rows for a file: `count` different problems, the same for the same arguments."""
    rows: dict[str, dict[str, Any]] = {}
    for number in range(100 * count + 100):
        if len(rows) == count:
            return list(rows.values())
        made = problem(generator(seed, "arithmetic", level, number), level)
        rows.setdefault(made.question, asdict(made) | {"level": level})
    raise ValueError(f"count={count}: level {level} has fewer different problems")


def show(value: Fraction) -> str:
    """A number as people write it; values here have at most two decimals.

    Example:
        show(Fraction(7, 2))      # '3.5'
    """
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.2f}".rstrip("0")


Made = tuple[str, str, Fraction]
"""Question, expression, answer."""


def _number(chance: Chance, low: int = 1, high: int = 99) -> int:
    return int(chance.integers(low, high + 1))


def _pick(chance: Chance, options: tuple[str, ...]) -> str:
    return options[int(chance.integers(len(options)))]


ONE = {
    "+": (
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "{a} plus {b}?",
        "{name} has {a} {things} and gets {b} more. How many?",
        "There are {a} {things} here and {b} there. How many in all?",
    ),
    "-": (
        "What is {a} - {b}?",
        "Take {b} from {a}.",
        "{a} minus {b}?",
        "Of {a} {things}, {b} break. How many are left?",
        "{name} had {a} {things} and gave away {b}. How many are left?",
    ),
    "*": (
        "What is {a} * {b}?",
        "Multiply {a} by {b}.",
        "{a} times {b}?",
        "{a} boxes hold {b} {things} each. How many {things}?",
        "{name} buys {a} bags of {b} {things}. How many {things}?",
    ),
}


def _one(chance: Chance) -> Made:
    sign = _pick(chance, tuple(ONE))
    a, b = _number(chance), _number(chance)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    text = _pick(chance, ONE[sign]).format(a=a, b=b, name=_pick(chance, NAMES), things=_pick(chance, THINGS))
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return text, f"{a} {sign} {b}", Fraction(value)


def _shopping(chance: Chance) -> Made:
    name, things = _pick(chance, NAMES), _pick(chance, THINGS)
    count, price, more = _number(chance, 2, 20), _number(chance, 2, 50), _number(chance)
    text = (
        f"{name} buys {count} {things} at {price} dollars each and a bag for {more} dollars. How many dollars in all?"
    )
    return text, f"{count} * {price} + {more}", Fraction(count * price + more)


def _change(chance: Chance) -> Made:
    name, things = _pick(chance, NAMES), _pick(chance, THINGS)
    count, price, rest = _number(chance, 2, 12), _number(chance, 2, 30), _number(chance)
    paid = count * price + rest
    text = f"{name} pays {paid} dollars for {count} {things} at {price} dollars each. How many dollars come back?"
    return text, f"{paid} - {count} * {price}", Fraction(rest)


def _give_and_take(chance: Chance) -> Made:
    name, things = _pick(chance, NAMES), _pick(chance, THINGS)
    a, b = _number(chance, 20), _number(chance)
    c = _number(chance, 1, a + b)
    text = f"{name} has {a} {things}, finds {b} and loses {c}. How many are left?"
    return text, f"{a} + {b} - {c}", Fraction(a + b - c)


def _share(chance: Chance) -> Made:
    things, people, each = _pick(chance, THINGS), _number(chance, 2, 20), _number(chance, 2)
    text = f"{people * each} {things} are shared among {people} people. How many does each get?"
    return text, f"{people * each} / {people}", Fraction(each)


def _percent(chance: Chance) -> Made:
    rate, price = 5 * _number(chance, 1, 19), _number(chance, 2, 200)
    text = f"A coat costs {price} dollars. The price falls by {rate} percent. How many dollars is it now?"
    return text, f"{price} * (100 - {rate}) / 100", Fraction(price * (100 - rate), 100)


def _mean(chance: Chance) -> Made:
    a, b, c, d = (_number(chance) for _ in range(4))
    return f"What is the mean of {a}, {b}, {c} and {d}?", f"({a} + {b} + {c} + {d}) / 4", Fraction(a + b + c + d, 4)


LEVELS: dict[int, tuple[Callable[[Chance], Made], ...]] = {
    1: (_one,),
    2: (_shopping, _change, _give_and_take),
    3: (_shopping, _change, _share, _percent, _mean),
}
