"""Which groups are worth training on: functions of a scored group."""

from __future__ import annotations

from collections.abc import Callable

from arborl.types import Group

Keep = Callable[[Group], bool]


def varied(group: Group) -> bool:
    """Rewards differ: one compared with another, something can be learned (DAPO's dynamic sampling)."""
    return len({episode.reward for episode in group.valid_episodes}) > 1


def solvable(group: Group) -> bool:
    """Somebody succeeded."""
    return any(episode.metrics.get("success", 0.0) >= 1 for episode in group.valid_episodes)
