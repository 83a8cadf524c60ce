"""Tool efficiency (OTC-PO): a reward times a factor for the number of tool calls.

The factor is multiplied, so few calls gain nothing for a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from arborl.rewards import find_reward
from arborl.rewards.reward import Reward, as_finite_numbers, as_reward, is_graded
from arborl.rewards.threaded_calls import call
from arborl.types import Episode


class Efficient:
    """A reward scaled by tool efficiency.

    With m calls in an episode, and n the fewest in a correct episode of its group:

        f = 2mn / (m + n)                      m where n is 0
        share = 1 where m = n = 0,  cos(mπ / (2m + smooth)) where n = 0,  sin(fπ / 2n) elsewhere

    so the fewest calls give 1 and more give less. Without a correct episode in the group, or with `group: false`, n
    is 0.

    Example:
        rewards: [{name: efficient, args: {base: equal}}]

    Args:
        base: the scaled reward, by name; an episode is correct if its value is at least 1.
        base_args: its arguments.
        alpha: factor of the whole.
        smooth: larger values reduce the penalty if no call was needed.
        group: compare with the other episodes of the task.
    """

    name = "efficient"

    def __init__(
        self,
        base: str | Reward = "equal",
        base_args: Mapping[str, Any] | None = None,
        alpha: float = 1.0,
        smooth: float = 1.0,
        group: bool = True,
    ):
        if smooth <= 0:
            raise ValueError(f"smooth={smooth}: give more than 0")
        self.base = find_reward(base, base_args or {}, "base_args") if isinstance(base, str) else as_reward(base)
        self.alpha, self.smooth, self.group = alpha, smooth, group
        self.graded = is_graded(self.base)

    async def __call__(self, episode: Episode) -> float:
        """The base reward; `across` scales it."""
        return sum(as_finite_numbers(self.name, await call(self.base, episode)).values())

    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> list[float]:
        """The scaled rewards of a group. Success depends on the base reward alone."""
        calls = [round(episode.metrics.get("tool/calls", 0.0)) for episode in episodes]
        right = [count for count, value in zip(calls, values, strict=True) if value >= 1]
        fewest = min(right) if right and self.group else 0
        for episode, value in zip(episodes, values, strict=True) if not self.graded else ():
            episode.metrics.setdefault("success", float(value >= 1))
        return [
            self.alpha * efficiency(count, fewest, self.smooth) * value
            for count, value in zip(calls, values, strict=True)
        ]


def efficiency(calls: int, fewest: int, smooth: float = 1.0) -> float:
    """1 for the fewest calls, decreasing to 0."""
    if fewest == 0:
        return 1.0 if calls == 0 else max(0.0, math.cos(calls * math.pi / (2 * calls + smooth)))
    effective = 2 * calls * fewest / (calls + fewest)
    return max(0.0, math.sin(effective * math.pi / (2 * fewest)))
