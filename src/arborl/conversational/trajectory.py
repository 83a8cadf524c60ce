"""What was said, as plain turns: for rewards, tests and people. Training looks at token ids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from arborl.rewards.text.turns import ROLES, ConversationTurn, as_turn, turns_of
from arborl.types import Episode, Group

__all__ = ["ROLES", "ConversationTurn", "MultiTurnTrajectory", "TrajectoryGroup", "as_turn", "turns_of"]


@dataclass(frozen=True, slots=True)
class MultiTurnTrajectory:
    """A whole conversation, and what it was worth."""

    trajectory_id: str
    turns: Sequence[ConversationTurn]
    episode_reward: float = 0.0
    trajectory_group_id: str | None = None
    """Conversations about the same scenario share it: they are compared with each other."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, episode: Episode) -> MultiTurnTrajectory:
        """An episode as people read it."""
        return cls(episode.id, turns_of(episode), episode.reward, episode.task.id, {"stop": str(episode.stop)})

    @property
    def replies(self) -> list[ConversationTurn]:
        """What the assistant said."""
        return [turn for turn in self.turns if turn.role == "assistant"]


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Conversations about one scenario."""

    group_id: str
    trajectories: Sequence[MultiTurnTrajectory]

    @classmethod
    def of(cls, group: Group) -> TrajectoryGroup:
        return cls(group.task.id, [MultiTurnTrajectory.of(episode) for episode in group.valid_episodes])

    @property
    def rewards(self) -> list[float]:
        return [one.episode_reward for one in self.trajectories]

    @property
    def advantages(self) -> list[float]:
        """How much better than the group's mean each was.

        Example (rewards 0.7, 0.9, 0.6, 0.8):  ->  -0.05, 0.15, -0.15, 0.05
        """
        mean = fmean(self.rewards) if self.trajectories else 0.0
        return [reward - mean for reward in self.rewards]
