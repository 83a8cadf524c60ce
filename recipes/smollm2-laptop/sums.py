"""Sums of two numbers, and a reward that grows as the reply comes closer to the answer."""

from __future__ import annotations

import random
import re
from typing import Any

import arborl
from arborl import Episode


@arborl.reward
def close(episode: Episode, answer: int) -> float:
    """1 for the right number, less the further the last number of the reply is from it, and 0 without a number."""
    numbers = re.findall(r"\d{1,9}", episode.answer)
    return 1 / (1 + abs(int(numbers[-1]) - answer)) if numbers else 0.0


def questions(count: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    pairs = {(rng.randrange(10, 50), rng.randrange(10, 50)): None for _ in range(2 * count)}
    return [
        {"question": f"What is {a} + {b}? Reply with the number only.", "answer": a + b} for a, b in list(pairs)[:count]
    ]
