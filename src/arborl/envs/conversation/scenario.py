"""What a conversation is about: the user's lines, what a good reply to each mentions, and who the user is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KEYS = ("id", "topic", "user_responses", "persona", "goal", "metadata")
LINE_KEYS = ("text", "expect", "reply")


@dataclass(frozen=True, slots=True)
class Line:
    """Something the user says."""

    text: str
    expect: tuple[str, ...] = ()
    """What a good reply mentions, whatever its case; `refund|money back` is met by either."""
    reply: str = ""
    """A good reply, for the oracle."""

    def met_by(self, reply: str) -> bool:
        """Whether the reply mentions all that is expected, as whole words."""
        return all(any(_mentions(reply, word) for word in wanted.split("|")) for wanted in self.expect)

    @property
    def good_reply(self) -> str:
        """A reply that meets the expectations."""
        return self.reply or " ".join(wanted.split("|")[0] for wanted in self.expect) or "I understand."


def _mentions(reply: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", reply, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class Persona:
    """How a user is."""

    name: str
    description: str = ""
    """For a simulated user: how to behave."""
    manner: str = ""
    """For a scripted user: said after the first line."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One conversation."""

    id: str
    topic: str
    lines: tuple[Line, ...]
    """What the user says, the opening first."""
    persona: str = ""
    """Name of the persona; any where it is empty."""
    goal: str = ""
    """For a simulated user: what they want."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Scenario:
        """Never changed, so copies of an environment share it."""
        return self


def read_scenario(given: Mapping[str, Any] | Scenario, where: str = "scenario") -> Scenario:
    """A scenario as it stands in a file: `{"id", "topic", "user_responses": [...], "metadata"}`.

    A response is a text, or `{"text", "expect": [...], "reply"}`.
    """
    if isinstance(given, Scenario):
        return given
    for key in given:
        if key not in KEYS:
            raise ValueError(f"{where}.{key}: unknown key. A scenario has: {', '.join(KEYS)}")
    lines = given.get("user_responses")
    if not isinstance(lines, Sequence) or isinstance(lines, str) or not lines:
        raise ValueError(f"{where}.user_responses={lines!r}: give a list of what the user says, the opening first")
    return Scenario(
        id=str(given.get("id", where)),
        topic=str(given.get("topic", "general")),
        lines=tuple(_line(line, f"{where}.user_responses.{number}") for number, line in enumerate(lines)),
        persona=str(given.get("persona", "")),
        goal=str(given.get("goal", "")),
        metadata=dict(given.get("metadata") or {}),
    )


def _line(given: Any, where: str) -> Line:
    if isinstance(given, str):
        return Line(given)
    if isinstance(given, Line):
        return given
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str) or set(given) - set(LINE_KEYS):
        raise ValueError(f"{where}={given!r}: give a text, or a mapping with {', '.join(LINE_KEYS)}")
    expect = given.get("expect", ())
    return Line(given["text"], (expect,) if isinstance(expect, str) else tuple(expect), str(given.get("reply", "")))


def pairs(scenarios: Sequence[Scenario], personas: Sequence[Persona], split: str) -> list[tuple[Scenario, Persona]]:
    """Scenario and persona together, of this split: one pair in ten, and at least one of several, is held out."""
    known = {persona.name: persona for persona in personas}
    every = [
        (scenario, persona)
        for scenario in scenarios
        for persona in ([known[scenario.persona]] if scenario.persona else personas)
    ]
    every.sort(key=lambda pair: _digest(f"{pair[0].id}/{pair[1].name}"))
    held_out = max(len(every) // 10, 1) if len(every) > 1 else 0
    return every[:held_out] if split == "held_out" else every[held_out:]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
