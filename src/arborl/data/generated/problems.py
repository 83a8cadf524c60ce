"""Arithmetic and programming problems, generated from a seed; every answer is computed.

`arborl data make arithmetic` and `arborl data make code` write files of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from arborl.seeds import generator

Chance = np.random.Generator
Row = dict[str, Any]
NUMBER_ANSWER = "Answer as <answer>number</answer>."
NAMES = ("Tom", "Ann", "Max", "Eva", "Ben", "Mia", "Sam", "Lea")
THINGS = ("apples", "pens", "cards", "eggs", "stones", "books", "coins", "shells")


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    """A question and what solves it."""

    question: str
    expression: str
    """What to ask a calculator."""
    answer: str


def arithmetic_problem(rng: Chance, level: int = 1) -> ArithmeticProblem:
    """One problem. Level 1 takes one operation on numbers below 100, level 2 two, level 3 also division and percent."""
    if level not in LEVELS:
        raise ValueError(f"level={level}: give 1, 2 or 3")
    makers = LEVELS[level]
    text, expression, value = makers[int(rng.integers(len(makers)))](rng)
    return ArithmeticProblem(f"{text} {NUMBER_ANSWER}", expression, show(value))


def _different(count: int, what: str, draw: Callable[[int], tuple[str, Row]]) -> list[Row]:
    """The first `count` rows with different keys; `draw` returns the key and the row of a number."""
    rows: dict[str, Row] = {}
    for number in range(100 * count + 100):
        if len(rows) == count:
            return list(rows.values())
        rows.setdefault(*draw(number))
    raise ValueError(f"count={count}: there are fewer different problems of {what}")


def problems(count: int, seed: int = 0, level: int = 1) -> list[Row]:
    """Rows for a file: `count` different problems, the same for the same arguments."""

    def draw(number: int) -> tuple[str, Row]:
        problem = arithmetic_problem(generator(seed, "arithmetic", level, number), level)
        return problem.question, asdict(problem) | {"level": level}

    return _different(count, f"level {level}", draw)


def show(value: Fraction) -> str:
    """A number as people write it; values here have at most two decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.2f}".rstrip("0")


Made = tuple[str, str, Fraction]
"""Question, expression, answer."""


def _number(rng: Chance, low: int = 1, high: int = 99) -> int:
    return int(rng.integers(low, high + 1))


def _pick(rng: Chance, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


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


def _one(rng: Chance) -> Made:
    sign = _pick(rng, tuple(ONE))
    a, b = _number(rng), _number(rng)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    text = _pick(rng, ONE[sign]).format(a=a, b=b, name=_pick(rng, NAMES), things=_pick(rng, THINGS))
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return text, f"{a} {sign} {b}", Fraction(value)


def _shopping(rng: Chance) -> Made:
    name, things = _pick(rng, NAMES), _pick(rng, THINGS)
    count, price, more = _number(rng, 2, 20), _number(rng, 2, 50), _number(rng)
    text = (
        f"{name} buys {count} {things} at {price} dollars each and a bag for {more} dollars. How many dollars in all?"
    )
    return text, f"{count} * {price} + {more}", Fraction(count * price + more)


def _change(rng: Chance) -> Made:
    name, things = _pick(rng, NAMES), _pick(rng, THINGS)
    count, price, rest = _number(rng, 2, 12), _number(rng, 2, 30), _number(rng)
    paid = count * price + rest
    text = f"{name} pays {paid} dollars for {count} {things} at {price} dollars each. How many dollars come back?"
    return text, f"{paid} - {count} * {price}", Fraction(rest)


def _give_and_take(rng: Chance) -> Made:
    name, things = _pick(rng, NAMES), _pick(rng, THINGS)
    a, b = _number(rng, 20), _number(rng)
    c = _number(rng, 1, a + b)
    text = f"{name} has {a} {things}, finds {b} and loses {c}. How many are left?"
    return text, f"{a} + {b} - {c}", Fraction(a + b - c)


def _share(rng: Chance) -> Made:
    things, people, each = _pick(rng, THINGS), _number(rng, 2, 20), _number(rng, 2)
    text = f"{people * each} {things} are shared among {people} people. How many does each get?"
    return text, f"{people * each} / {people}", Fraction(each)


def _percent(rng: Chance) -> Made:
    rate, price = 5 * _number(rng, 1, 19), _number(rng, 2, 200)
    text = f"A coat costs {price} dollars. The price falls by {rate} percent. How many dollars is it now?"
    return text, f"{price} * (100 - {rate}) / 100", Fraction(price * (100 - rate), 100)


def _mean(rng: Chance) -> Made:
    a, b, c, d = (_number(rng) for _ in range(4))
    return f"What is the mean of {a}, {b}, {c} and {d}?", f"({a} + {b} + {c} + {d}) / 4", Fraction(a + b + c + d, 4)


LEVELS: dict[int, tuple[Callable[[Chance], Made], ...]] = {
    1: (_one,),
    2: (_shopping, _change, _give_and_take),
    3: (_shopping, _change, _share, _percent, _mean),
}


# ------------------------------------------------------------------------------------------------ programming

WORDS = ("banana", "seedling", "river", "mirror", "lantern", "pepper", "garden", "window", "letter", "summer")
TEXT_ANSWER = "Answer as <answer>text</answer>."


def _numbers(rng: Chance, count: int, high: int = 99) -> list[int]:
    return [int(x) for x in rng.integers(1, high + 1, size=count)]


def _computation(rng: Chance) -> tuple[str, str]:
    match int(rng.integers(8)):
        case 0:
            a, b = _numbers(rng, 2, 999)
            return f"What is {a} * {b}?", f"{a} * {b}"
        case 1:
            a, b = _numbers(rng, 1, 999)[0], _numbers(rng, 1, 30)[0]
            return f"What is the remainder of {a} divided by {b}?", f"{a} % {b}"
        case 2:
            (n,) = _numbers(rng, 1)
            return f"What is the sum of the numbers from 1 to {n}?", f"sum(range(1, {n + 1}))"
        case 3:
            numbers = _numbers(rng, 5)
            return f"What is the largest of {', '.join(map(str, numbers))}?", f"max({numbers})"
        case 4:
            numbers = _numbers(rng, 4)
            return f"What is the sum of {', '.join(map(str, numbers))}?", f"sum({numbers})"
        case 5:
            word = _word(rng)
            return f"Write {word} backwards.", f"{word!r}[::-1]"
        case 6:
            word = _word(rng)
            letter = word[int(rng.integers(len(word)))]
            return f"How many times is {letter} in {word}?", f"{word!r}.count({letter!r})"
    word = _word(rng)
    return f"How many letters has {word}?", f"len({word!r})"


def _word(rng: Chance) -> str:
    """Two words as one: there are a hundred of them."""
    return _pick(rng, WORDS) + _pick(rng, WORDS)


def computation_problem(rng: Chance) -> Row:
    """A question that one line of Python answers."""
    question, expression = _computation(rng)
    answer = eval(
        expression, {"__builtins__": {"sum": sum, "max": max, "len": len, "range": range}}
    )  # ours, from above
    return {"question": f"{question} {TEXT_ANSWER}", "code": f"print({expression})", "answer": str(answer)}


# ------------------------------------------------------------------------------------------------ write a function

FUNCTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("scale", "x", "returns {n} times the number x", "{n} * x"),
    ("shift", "x", "returns the number x plus {n}", "x + {n}"),
    ("is_multiple", "x", "says whether the number x is a multiple of {n}", "x % {n} == 0"),
    ("digit_sum", "x", "returns the sum of the digits of {n} times the number x", "sum(int(d) for d in str({n} * x))"),
    ("largest", "items", "returns the largest number of the list items", "max(items)"),
    (
        "above",
        "items",
        "returns those numbers of the list items that are above {n}, in order",
        "[i for i in items if i > {n}]",
    ),
    ("every", "items", "returns every {n}. element of the list items, from the first on", "items[::{n}]"),
    ("backwards", "text", "returns the text backwards", "text[::-1]"),
    ("repeat", "text", "returns the text repeated {n} times", "text * {n}"),
    ("vowels", "text", "counts the vowels a, e, i, o and u in the text", "sum(c in 'aeiou' for c in text)"),
)
"""Name, parameter, what it does, and an expression that does it."""


def function(rng: Chance, cases: int = 5) -> Row:
    """A function to write, with calls and what they return."""
    name, parameter, does, body = FUNCTIONS[int(rng.integers(len(FUNCTIONS)))]
    n = int(rng.integers(2, 10))
    body = body.format(n=n)
    solve = eval(f"lambda {parameter}: {body}")  # ours, from the table above
    inputs = [_input(rng, parameter) for _ in range(cases)]
    return {
        "question": f"Write a Python function {name}({parameter}) that {does.format(n=n)}. "
        "Answer with the code in a ```python block.",
        "code": f"def {name}({parameter}):\n    return {body}",
        "tests": [{"function": name, "args": [each], "returns": solve(each)} for each in inputs],
    }


def program(rng: Chance, cases: int = 5) -> Row:
    """A program to write, with inputs and what it prints."""
    n = int(rng.integers(2, 10))
    does, body = (
        (f"prints their sum times {n}", f"sum(numbers) * {n}"),
        ("prints the largest of them", "max(numbers)"),
        (f"prints how many of them are above {n}", f"sum(x > {n} for x in numbers)"),
    )[int(rng.integers(3))]
    solve = eval(f"lambda numbers: {body}")  # ours, from the line above
    inputs = [_numbers(rng, int(rng.integers(1, 6)), 20) for _ in range(cases)]
    return {
        "question": f"Write a Python program that reads one line of numbers and {does}. "
        "Answer with the code in a ```python block.",
        "code": f"numbers = [int(x) for x in input().split()]\nprint({body})",
        "tests": [{"input": " ".join(map(str, each)), "output": str(solve(each))} for each in inputs],
    }


def _input(rng: Chance, parameter: str) -> Any:
    if parameter == "x":
        return int(rng.integers(0, 200))
    if parameter == "items":
        return _numbers(rng, int(rng.integers(1, 8)), 20)
    return _word(rng)


CODE_KINDS: dict[str, Callable[[Chance], Row]] = {
    "compute": computation_problem,
    "function": function,
    "program": program,
}


def code_problems(count: int, seed: int = 0, kind: str = "compute") -> list[Row]:
    """Rows for a file, the same for the same arguments; those of `computation_problem` have different questions."""
    if kind not in CODE_KINDS:
        raise ValueError(f"kind={kind!r}: give {', '.join(CODE_KINDS)}")

    def draw(number: int) -> tuple[str, Row]:
        row = CODE_KINDS[kind](generator(seed, "code", kind, number))
        return row["question"] if kind == "compute" else str(number), row

    return _different(count, f"kind {kind!r}", draw)
