"""What a message says to do: the text between `<answer>` and `</answer>`, as one of the moves there are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


def read_answer(text: str) -> str | None:
    """What stands in the first `<answer>…</answer>`, stripped; None where there is none."""
    _, opened, rest = text.partition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if opened and closed else None


def read_choice(text: str, choices: Iterable[str]) -> str | None:
    """The choice that the first answer names, whatever its case; None where it names none.

    Example:
        read_choice("I go <answer> right </answer>", ["Left", "Right"])      # 'Right'
    """
    said = read_answer(text)
    if said is None:
        return None
    return _by_lower(tuple(choices)).get(said.lower())


@lru_cache(maxsize=256)
def _by_lower(choices: tuple[str, ...]) -> dict[str, str]:
    return {choice.lower(): choice for choice in choices}


def answer(text: str) -> str:
    """The text as an answer."""
    return f"<answer>{text}</answer>"
