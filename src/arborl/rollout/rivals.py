"""What else the model might have said: the likeliest tokens beside each one that was sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Rivals:
    """Listens to a completion (`engines.engine.Listener`).

    Args:
        count: rivals of each token.
    """

    def __init__(self, count: int):
        self.count, self.top = count, count + 1  # the token itself may be among them
        self.heard: list[tuple[tuple[int, float], ...]] = []

    def __call__(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        others = [(other, chance) for other, chance in top if other != token and math.isfinite(chance)]
        self.heard.append(tuple(others[: self.count]))
