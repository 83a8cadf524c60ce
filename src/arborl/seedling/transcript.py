"""What every writer of transcripts needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from arborl.types import Message, ToolSpec

Chance = np.random.Generator
T = TypeVar("T")

MARKS = (
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<code>",
    "</code>",
    "<result>",
    "</result>",
    '{"name": "',
    '", "arguments": {"',
    '": "',
    '"}}',
)
"""Whole in every text; of the last four, what every call has in common."""
PIECE = r" ?[A-Z]?[a-z]+|\d|[A-Z]|\s|[^\sA-Za-z\d]"
"""What no token goes beyond, besides marks: a word, a digit, a capital, a sign."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation; the assistant's messages are what is imitated."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    since: int = 0
    """Messages before this one were written when the context was another, and are not imitated."""


def pick(chance: Chance, options: Sequence[T]) -> T:
    return options[int(chance.integers(len(options)))]


def draw(chance: Chance, shares: dict[str, float]) -> str:
    """One of the names, each as often as its share."""
    return str(chance.choice(list(shares), p=list(shares.values())))
