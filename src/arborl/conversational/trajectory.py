"""What was said, as plain turns: for rewards, tests and people. Training looks at token ids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from arborl.types import Episode, Group, Message

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One message of a conversation.

    Example:
        ConversationTurn(role="assistant", content="Your parcel is on its way.", reward=0.8)
    """

    role: str
    content: str
    reward: float | None = None
    """What this turn alone was worth, where somebody said so."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role={self.role!r}: give one of {', '.join(ROLES)}")


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
        return cls(group.task.id, [MultiTurnTrajectory.of(episode) for episode in group.survivors])

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


def turns_of(episode: Episode) -> list[ConversationTurn]:
    """All that was said in an episode, in order."""
    said = [as_turn(message) for message in episode.opening]
    for turn in episode.turns:
        said.append(as_turn(turn.message, turn.reward))
        said += [as_turn(message) for message in turn.observation]
    return said


def as_turn(message: Message, reward: float | None = None) -> ConversationTurn:
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return ConversationTurn(message.role, message.content, reward, {"tool_calls": calls} if calls else {})
