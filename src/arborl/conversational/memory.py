"""What an agent remembers of earlier conversations: the latest as they were, older ones as a summary it wrote."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.types import Message

Said = tuple[str, str]
"""Role and text."""
Write = Callable[[str], Awaitable[str]]
"""A request to the model, and what it wrote."""

HEAD = "What you remember of earlier conversations:"
ASK = "Summarize these earlier conversations in a few sentences. Keep names, numbers, wishes and what was agreed.\n\n{}"


class ConversationMemory:
    """Remembers conversations, one after the other, for the next.

    The agent is shown it after its system prompt. A conversation that goes on replaces what was remembered of it; the
    one at hand is not shown twice. Once more than `summarization_threshold` messages are remembered word by word, the
    older half of them is replaced by a summary, which the model writes.

    While an agent is trained, its memory is what it was at the start: attempts that are compared must begin alike.

    Args:
        max_turns: messages that are kept word by word at most, summaries or not.
        summarization_threshold: more than this many, and older ones are summarised.

    Example:
        agent = MultiTurnAgent(config, memory=ConversationMemory(max_turns=100, summarization_threshold=50))
    """

    def __init__(self, max_turns: int = 100, summarization_threshold: int = 50):
        for name, value in (("max_turns", max_turns), ("summarization_threshold", summarization_threshold)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"ConversationMemory, {name}={value!r}: must be a whole number >= 1. Write 50.")
        if summarization_threshold > max_turns:
            raise ConfigError(
                f"ConversationMemory, summarization_threshold={summarization_threshold} is above "
                f"max_turns={max_turns}: what is left out would never be summarised. Write {max_turns}."
            )
        self.max_turns, self.summarization_threshold = max_turns, summarization_threshold
        self.summary = ""
        """Of what is no longer kept word by word."""
        self.conversations: list[tuple[Said, ...]] = []
        """Word by word, the oldest first; without system messages."""

    def __len__(self) -> int:
        """Messages that are kept word by word."""
        return sum(map(len, self.conversations))

    def recall(self, present: Sequence[Message] = ()) -> str:
        """What is remembered, as a text; of the present conversation, nothing."""
        now = _said(present)
        others = [one for one in self.conversations if now[: len(one)] != one]
        parts = ([self.summary] if self.summary else []) + ["\n".join(map(": ".join, one)) for one in others]
        return "\n\n".join((HEAD, *parts)) if parts else ""

    async def remember(self, conversation: Sequence[Message], write: Write) -> None:
        """Keep this conversation, as far as it has come.

        Args:
            conversation: all that was said, by both.
            write: asks the model, for a summary.
        """
        now = _said(conversation)
        self.conversations = [one for one in self.conversations if now[: len(one)] != one] + [now]
        if len(self) > self.summarization_threshold and len(self.conversations) > 1:
            await self._summarise(write)
        while len(self) > self.max_turns:
            first = self.conversations[0][1:] if len(self.conversations) == 1 else ()
            self.conversations[:1] = [first] if first else []

    async def _summarise(self, write: Write) -> None:
        """Put a summary in the place of the older half, whole conversations at a time, never of the latest."""
        size, old = len(self), 0
        while old < len(self.conversations) - 1 and sum(map(len, self.conversations[:old])) < size / 2:
            old += 1
        texts = ["\n".join(map(": ".join, one)) for one in self.conversations[:old]]
        leaving = self.conversations[:old]
        summary = await write(ASK.format("\n\n".join(([self.summary] if self.summary else []) + texts)))
        self.summary = summary.strip() or self.summary
        self.conversations = [one for one in self.conversations if one not in leaving]

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(json.dumps(self._state(), ensure_ascii=False, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ConversationMemory:
        """What `save` wrote."""
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        made = cls(state["max_turns"], state["summarization_threshold"])
        made.summary = state["summary"]
        made.conversations = [tuple((role, text) for role, text in one) for one in state["conversations"]]
        return made

    def _state(self) -> Mapping[str, Any]:
        return {
            "max_turns": self.max_turns,
            "summarization_threshold": self.summarization_threshold,
            "summary": self.summary,
            "conversations": self.conversations,
        }


def _said(messages: Sequence[Message]) -> tuple[Said, ...]:
    return tuple((message.role, message.content) for message in messages if message.role != "system")
