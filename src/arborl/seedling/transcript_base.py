"""`Transcript`, and what all writers of transcripts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from arborl.types import Message, ToolSpec

T = TypeVar("T")

SPECIAL_STRINGS = (
    "<answer>", "</answer>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<code>", "</code>", "<result>", "</result>",
    '{"name": "', '", "arguments": {"', '": "', '"}}',
)  # fmt: skip
"""Strings that are one token each. The last four are the fixed parts of a tool call."""
PIECE = r" ?[A-Z]?[a-z]+|\d|[A-Z]|\s|[^\sA-Za-z\d]"
"""Pre-tokenization: a token is at most one word, digit, capital or sign."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation. The model is trained on the assistant's messages."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    train_from: int = 0
    """Index of the first message that is trained on. Earlier messages were written in another context."""


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def draw(rng: np.random.Generator, shares: dict[str, float]) -> str:
    return str(rng.choice(list(shares), p=list(shares.values())))
