"""Transcripts of sums with their working: column by column from the right, one pair of numbers after the other.

The problems are those of `reasoning_gym`'s `chain_sum`, drawn by the environment itself from the training split, so the
prompts that are imitated are the prompts that the model will see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborl.envs.adapters.other_packages import ReasoningGym
from arborl.envs.env import format_answer
from arborl.seedling.game_transcripts import play
from arborl.seedling.transcript import Chance, Transcript


def worked_sum(chance: Chance, config: Mapping[str, Any] | None = None) -> Transcript:
    """One problem of `chain_sum` and its working. `config` are the arguments of the data set."""
    env = ReasoningGym("chain_sum", config)
    return play(env, lambda: working(env.entry["metadata"]["expression"]), chance, mumbling=0.0)


def working(expression: str) -> str:
    """The working of a chain of sums, and its answer.

    >>> print(working("914 + 807 - 1961"))
    914 + 807: 4+7=11, 1+0+1=2, 9+8=17. So 1721.
    1721 - 1961 = -(1961 - 1721): 1-1=0, 6-2=4, 9-7=2, 1-1=0. So -240.
    <answer>-240</answer>
    """
    first, *rest = expression.split()
    total, lines = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        line, total = pair(total, sign, int(number))
        lines.append(line)
    return "\n".join([*lines, format_answer(str(total))])


def pair(left: int, sign: str, right: int) -> tuple[str, int]:
    """The working of one sum or difference, and its value; `right` is not negative.

    >>> pair(-5, "-", 12)
    ('-5 - 12 = -(5 + 12): 5+2=7, 0+1=1. So -17.', -17)
    >>> pair(-5, "+", 12)
    ('-5 + 12 = 12 - 5: 12-5=7, 1-0-1=0. So 7.', 7)
    """
    total = left + right if sign == "+" else left - right
    if (left >= 0) == (sign == "+"):
        high, low, joined = abs(left), right, "+"
    else:
        high, low, joined = max(abs(left), right), min(abs(left), right), "-"
    plain = f"{high} {joined} {low}"
    turned = plain if total >= 0 else f"-({plain})"
    written = f"{left} {sign} {right}"
    head = written if turned == written else f"{written} = {turned}"
    columns = add_columns(high, low) if joined == "+" else subtract_columns(high, low)
    return f"{head}: {', '.join(columns)}. So {total}.", total


def add_columns(a: int, b: int) -> list[str]:
    """The columns of `a + b` from the right; a carry is a third term of the next column."""
    columns, carry = [], 0
    for x, y in digit_pairs(a, b):
        value = x + y + carry
        columns.append(f"{x}+{y}{'+1' if carry else ''}={value}")
        carry = value // 10
    return columns


def subtract_columns(a: int, b: int) -> list[str]:
    """The columns of `a - b`, with `a >= b`, from the right; a digit that borrows is written with its ten."""
    columns, borrow = [], 0
    for x, y in digit_pairs(a, b):
        ten = 10 if x < y + borrow else 0
        columns.append(f"{x + ten}-{y}{'-1' if borrow else ''}={x + ten - y - borrow}")
        borrow = 1 if ten else 0
    return columns


def digit_pairs(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of both numbers from the right, as many as the longer one has."""
    width = max(len(str(a)), len(str(b)))
    return [(int(x), int(y)) for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True)]
