"""Problems for agents that write code, made from a seed: answers to compute, and functions or programs with tests.

`arborl data make code` writes files of them. Every row carries code that solves it, and a test runs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arborl.seeds import generator

Chance = np.random.Generator
Row = dict[str, Any]
WORDS = ("banana", "seedling", "river", "mirror", "lantern", "pepper", "garden", "window", "letter", "summer")
ASKED = "Answer as <answer>text</answer>."


def _pick(chance: Chance, options: Sequence[str]) -> str:
    return options[int(chance.integers(len(options)))]


def _numbers(chance: Chance, count: int, high: int = 99) -> list[int]:
    return [int(x) for x in chance.integers(1, high + 1, size=count)]


# ------------------------------------------------------------------------------------------------ compute an answer


def _product(chance: Chance) -> tuple[str, str]:
    a, b = _numbers(chance, 2, 999)
    return f"What is {a} * {b}?", f"{a} * {b}"


def _remainder(chance: Chance) -> tuple[str, str]:
    a, b = _numbers(chance, 1, 999)[0], _numbers(chance, 1, 30)[0]
    return f"What is the remainder of {a} divided by {b}?", f"{a} % {b}"


def _sum_to(chance: Chance) -> tuple[str, str]:
    (n,) = _numbers(chance, 1)
    return f"What is the sum of the numbers from 1 to {n}?", f"sum(range(1, {n + 1}))"


def _largest(chance: Chance) -> tuple[str, str]:
    numbers = _numbers(chance, 5)
    return f"What is the largest of {', '.join(map(str, numbers))}?", f"max({numbers})"


def _total(chance: Chance) -> tuple[str, str]:
    numbers = _numbers(chance, 4)
    return f"What is the sum of {', '.join(map(str, numbers))}?", f"sum({numbers})"


def _backwards(chance: Chance) -> tuple[str, str]:
    word = _word(chance)
    return f"Write {word} backwards.", f"{word!r}[::-1]"


def _letters(chance: Chance) -> tuple[str, str]:
    word = _word(chance)
    letter = word[int(chance.integers(len(word)))]
    return f"How many times is {letter} in {word}?", f"{word!r}.count({letter!r})"


def _length(chance: Chance) -> tuple[str, str]:
    word = _word(chance)
    return f"How many letters has {word}?", f"len({word!r})"


def _word(chance: Chance) -> str:
    """Two words as one: there are a hundred of them."""
    return _pick(chance, WORDS) + _pick(chance, WORDS)


COMPUTE: tuple[Callable[[Chance], tuple[str, str]], ...] = (
    _product, _remainder, _sum_to, _largest, _total, _backwards, _letters, _length,
)  # fmt: skip


def compute(chance: Chance) -> Row:
    """A question that one line of Python answers.

    Example:
        compute(generator(0, "example"))
        # {"question": "Write riverlantern backwards. Answer …", "code": "print('riverlantern'[::-1])", "answer": …}
    """
    question, expression = COMPUTE[int(chance.integers(len(COMPUTE)))](chance)
    answer = eval(
        expression, {"__builtins__": {"sum": sum, "max": max, "len": len, "range": range}}
    )  # ours, from above
    return {"question": f"{question} {ASKED}", "code": f"print({expression})", "answer": str(answer)}


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


def function(chance: Chance, cases: int = 5) -> Row:
    """A function to write, with calls and what they return."""
    name, parameter, does, body = FUNCTIONS[int(chance.integers(len(FUNCTIONS)))]
    n = int(chance.integers(2, 10))
    body = body.format(n=n)
    solve = eval(f"lambda {parameter}: {body}")  # ours, from the table above
    inputs = [_input(chance, parameter) for _ in range(cases)]
    return {
        "question": f"Write a Python function {name}({parameter}) that {does.format(n=n)}. "
        "Answer with the code in a ```python block.",
        "code": f"def {name}({parameter}):\n    return {body}",
        "tests": [{"function": name, "args": [each], "returns": solve(each)} for each in inputs],
    }


def program(chance: Chance, cases: int = 5) -> Row:
    """A program to write, with inputs and what it prints."""
    n = int(chance.integers(2, 10))
    does, body = (
        (f"prints their sum times {n}", f"sum(numbers) * {n}"),
        ("prints the largest of them", "max(numbers)"),
        (f"prints how many of them are above {n}", f"sum(x > {n} for x in numbers)"),
    )[int(chance.integers(3))]
    solve = eval(f"lambda numbers: {body}")  # ours, from the line above
    inputs = [_numbers(chance, int(chance.integers(1, 6)), 20) for _ in range(cases)]
    return {
        "question": f"Write a Python program that reads one line of numbers and {does}. "
        "Answer with the code in a ```python block.",
        "code": f"numbers = [int(x) for x in input().split()]\nprint({body})",
        "tests": [{"input": " ".join(map(str, each)), "output": str(solve(each))} for each in inputs],
    }


def _input(chance: Chance, parameter: str) -> Any:
    if parameter == "x":
        return int(chance.integers(0, 200))
    if parameter == "items":
        return _numbers(chance, int(chance.integers(1, 8)), 20)
    return _word(chance)


KINDS: dict[str, Callable[[Chance], Row]] = {"compute": compute, "function": function, "program": program}


def code_problems(count: int, seed: int = 0, kind: str = "compute") -> list[Row]:
    """Rows for a file, the same for the same arguments; those of `compute` have different questions."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: give {', '.join(KINDS)}")
    rows: dict[str, Row] = {}
    for number in range(100 * count + 100):
        if len(rows) == count:
            return list(rows.values())
        row = KINDS[kind](generator(seed, "code", kind, number))
        rows.setdefault(row["question"] if kind == "compute" else str(number), row)
    raise ValueError(f"count={count}: there are fewer different problems of kind {kind!r}")
