"""Rewards that follow a rule."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from arborl.rewards.reward import reward
from arborl.rewards.tags import last_tagged
from arborl.types import Episode

THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")


@reward
def environment(episode: Episode) -> float:
    """What the environment gave, summed over the turns. Its short name is `env`."""
    return sum(turn.reward for turn in episode.turns)


environment.by_turn = True


@reward
def exact(episode: Episode, answer: Any) -> float:
    """1 where the final answer is the task's `answer`, else 0.

    White space does not matter, nor how a number is written: `1,000` and `1000.0` are equal.
    """
    return float(same(final_answer(episode.answer), str(answer)))


def final_answer(text: str) -> str:
    """What stands in the last `<answer>…</answer>`; without one, the last line that is not blank."""
    tagged = last_tagged(text, "answer")
    lines = [line for line in text.splitlines() if line.strip()]
    return tagged if tagged is not None else lines[-1] if lines else ""


def same(given: str, wanted: str) -> bool:
    """Equal as text or, where both are numbers, as numbers."""
    given, wanted = " ".join(given.split()), " ".join(wanted.split())
    if given == wanted:
        return True
    left, right = as_number(given), as_number(wanted)
    return left is not None and left == right


def as_number(text: str) -> Decimal | None:
    """The number the whole text is, exactly; None where it is not one."""
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
