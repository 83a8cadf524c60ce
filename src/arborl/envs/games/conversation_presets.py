"""Scenarios of the conversation environment: their format, and presets for three domains."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEYS = ("id", "topic", "user_responses", "persona", "goal", "metadata")
LINE_KEYS = ("text", "expect", "reply")


@dataclass(frozen=True, slots=True)
class UserLine:
    """One message of a scripted user."""

    text: str
    expect: tuple[str, ...] = ()
    """Texts that a good reply contains, ignoring case; `refund|money back`: one of the two."""
    reply: str = ""
    """A good reply, for the oracle."""

    def is_met_by(self, reply: str) -> bool:
        """Whether the reply contains every expected text as whole words."""

        def mentions(word: str) -> bool:
            return re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", reply, re.IGNORECASE) is not None

        return all(any(map(mentions, wanted.split("|"))) for wanted in self.expect)

    @property
    def good_reply(self) -> str:
        return self.reply or " ".join(wanted.split("|")[0] for wanted in self.expect) or "I understand."


@dataclass(frozen=True, slots=True)
class Persona:
    """Character of a user."""

    name: str
    description: str = ""
    """Part of the simulated user's prompt."""
    remark: str = ""
    """Appended to the first line of a scripted user."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One conversation."""

    id: str
    topic: str
    lines: tuple[UserLine, ...]
    """Messages of the user, in order."""
    persona: str = ""
    """Name of the persona; empty for any."""
    goal: str = ""
    """Goal of a simulated user."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Scenario:
        """Immutable: copies of an environment share it."""
        return self


def read_scenario(given: Mapping[str, Any] | Scenario, where: str = "scenario") -> Scenario:
    """A scenario from its JSON form: `{"id", "topic", "user_responses": [...], "metadata"}`.

    A response is a text, or `{"text", "expect": [...], "reply"}`.
    """
    if isinstance(given, Scenario):
        return given
    for key in given:
        if key not in KEYS:
            raise ValueError(f"{where}.{key}: unknown key. A scenario has: {', '.join(KEYS)}")
    lines = given.get("user_responses")
    if not isinstance(lines, Sequence) or isinstance(lines, str) or not lines:
        raise ValueError(f"{where}.user_responses={lines!r}: give a list of the user's messages")
    return Scenario(
        id=str(given.get("id", where)),
        topic=str(given.get("topic", "general")),
        lines=tuple(_line(line, f"{where}.user_responses.{number}") for number, line in enumerate(lines)),
        persona=str(given.get("persona", "")),
        goal=str(given.get("goal", "")),
        metadata=dict(given.get("metadata") or {}),
    )


def _line(given: Any, where: str) -> UserLine:
    if isinstance(given, str):
        return UserLine(given)
    if isinstance(given, UserLine):
        return given
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str) or set(given) - set(LINE_KEYS):
        raise ValueError(f"{where}={given!r}: give a text, or a mapping with {', '.join(LINE_KEYS)}")
    expect = given.get("expect", ())
    return UserLine(given["text"], (expect,) if isinstance(expect, str) else tuple(expect), str(given.get("reply", "")))


def split_pairs(
    scenarios: Sequence[Scenario], personas: Sequence[Persona], split: str
) -> list[tuple[Scenario, Persona]]:
    """Pairs of scenario and persona in this split: one pair in ten, at least one, is held out."""
    known = {persona.name: persona for persona in personas}
    every = [
        (scenario, persona)
        for scenario in scenarios
        for persona in ([known[scenario.persona]] if scenario.persona else personas)
    ]
    every.sort(key=lambda pair: hashlib.blake2b(f"{pair[0].id}/{pair[1].name}".encode(), digest_size=8).digest())
    held_out = max(len(every) // 10, 1) if len(every) > 1 else 0
    return every[:held_out] if split == "held_out" else every[held_out:]


PERSONAS = (
    Persona("plain", "You are matter-of-fact."),
    Persona("polite", "You are polite and patient.", "Thank you in advance."),
    Persona("impatient", "You are in a hurry and easily annoyed.", "Please be quick."),
    Persona("unsure", "You are unsure of yourself and ask for reassurance.", "I am not sure I am right here."),
)


@dataclass(frozen=True, slots=True)
class ConversationPreset:
    """System message, scenarios and personas of one domain."""

    system: str
    scenarios: tuple[Scenario, ...]
    personas: tuple[Persona, ...] = PERSONAS


def _read_presets() -> dict[str, ConversationPreset]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: ConversationPreset(
            row["system"], tuple(read_scenario({"topic": name, **one}, name) for one in row["scenarios"])
        )
        for name, row in rows.items()
    }


PRESETS = _read_presets()
CONVERSATION_CONFIGS: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS}
"""Arguments of `Conversation`, by domain: `Conversation(**CONVERSATION_CONFIGS["sales"])`."""
