"""What was said, as plain turns, and as exchanges: what the user said, and what was replied to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from arborl.types import Episode, Message, Role, Task, Turn

ROLES = ("system", "user", "assistant", "tool")
OPEN, CLOSE = "<think>", "</think>"


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
class Exchange:
    """What the user said, and what was replied to it."""

    asked: str
    """Empty where the assistant spoke first."""
    reply: str
    """Without thoughts and tool calls; empty where nothing was said."""


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


def as_turns(given: Sequence[ConversationTurn | Mapping[str, Any]]) -> list[ConversationTurn]:
    """Turns, where some may be messages of OpenAI's shape: `{"role": "user", "content": "Hello"}`."""
    return [
        ConversationTurn(str(turn.get("role")), str(turn.get("content") or "")) if isinstance(turn, Mapping) else turn
        for turn in given
    ]


def episode_of(turns: Sequence[ConversationTurn], fields: Mapping[str, Any]) -> Episode:
    """Turns as an episode, for rewards that read those."""
    starts = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    messages = [Message(cast(Role, turn.role), turn.content) for turn in turns]
    opening = tuple(messages[: starts[0]] if starts else messages)
    made = Episode("conversation", Task("conversation", opening, fields), opening=opening)
    for start, end in zip(starts, [*starts[1:], len(turns)], strict=False):
        made.turns.append(Turn(messages[start], tuple(messages[start + 1 : end]), turns[start].reward or 0.0))
    return made


def exchanges(turns: Sequence[ConversationTurn]) -> list[Exchange]:
    """The conversation as the user sees it. What the user says last, and nobody could answer, is left out.

    Example (user: Hi. Are you there? assistant: Yes.  user: Good.):
        [Exchange("Hi. Are you there?", "Yes.")]
    """
    found: list[Exchange] = []
    asked: list[str] = []
    replied: list[str] | None = None
    for turn in turns:
        if turn.role == "user":
            if replied is not None:
                found.append(Exchange("\n".join(asked), "\n".join(replied)))
                asked, replied = [], None
            asked.append(turn.content)
        elif turn.role == "assistant":
            said = "" if turn.metadata.get("tool_calls") else spoken(turn.content)
            replied = [*(replied or []), *([said] if said else [])]
    if replied is not None:
        found.append(Exchange("\n".join(asked), "\n".join(replied)))
    return found


def spoken(text: str) -> str:
    """A reply without its thoughts; one whose thoughts never end says nothing.

    Example:
        spoken("<think>Hm.</think> Yes.")      # 'Yes.'
    """
    text = text.rpartition(CLOSE)[2]
    return text.partition(OPEN)[0].strip()
