"""Scenarios of the conversation environment: their format, and presets for three domains."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        return all(any(_mentions(reply, word) for word in wanted.split("|")) for wanted in self.expect)

    @property
    def good_reply(self) -> str:
        return self.reply or " ".join(wanted.split("|")[0] for wanted in self.expect) or "I understand."


def _mentions(reply: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", reply, re.IGNORECASE) is not None


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
    every.sort(key=lambda pair: _digest(f"{pair[0].id}/{pair[1].name}"))
    held_out = max(len(every) // 10, 1) if len(every) > 1 else 0
    return every[:held_out] if split == "held_out" else every[held_out:]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


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


def _scenario(topic: str, id: str, goal: str, *lines: tuple[str, str, str]) -> Scenario:
    """Each line: user message, expected texts (comma-separated), a good reply."""
    made = tuple(UserLine(text, tuple(expect.split(",")) if expect else (), reply) for text, expect, reply in lines)
    return Scenario(id, topic, made, goal=goal)


def _service(id: str, goal: str, *lines: tuple[str, str, str]) -> Scenario:
    return _scenario("customer_service", id, goal, *lines)


def _support(id: str, goal: str, *lines: tuple[str, str, str]) -> Scenario:
    return _scenario("technical_support", id, goal, *lines)


def _sale(id: str, goal: str, *lines: tuple[str, str, str]) -> Scenario:
    return _scenario("sales", id, goal, *lines)


CUSTOMER_SERVICE = (
    _service(
        "late_order",
        "to know where the order is",
        ("My order has not arrived.", "order number|number", "I am sorry. What is your order number?"),
        ("It is 12345.", "12345", "Order 12345 is on its way."),
        ("When will it be here?", "tomorrow|days|today", "It will be with you in two days."),
    ),
    _service(
        "refund",
        "to get the money back",
        ("I want my money back.", "reason|why", "I can help. What is the reason?"),
        ("The shirt is too small.", "return|exchange", "You can return it, or exchange it for a larger one."),
        ("I will return it.", "refund,days|soon", "Your refund will be there in five days."),
    ),
    _service(
        "address",
        "to change the address",
        ("I have moved.", "address", "What is your new address?"),
        ("12 Mill Road.", "12 Mill Road", "I have noted 12 Mill Road."),
        ("Is that all?", "yes|all set", "Yes, that is all."),
    ),
    _service(
        "broken_cup",
        "to get a new cup",
        ("The cup you sent is broken.", "sorry", "I am sorry about the cup."),
        ("What now?", "new one|replacement", "We will send you a new one."),
        ("Do I have to pay?", "free|no", "No, it is free."),
    ),
    _service(
        "invoice",
        "to get an invoice",
        ("I need an invoice.", "order|number", "For which order number?"),
        ("For 777.", "777", "Here is the invoice for 777."),
        ("Can I have it by email?", "email|mail", "Yes, I will send it by email."),
    ),
    _service(
        "hours",
        "to know when the shop is open",
        ("When are you open?", "nine|9", "From nine to six."),
        ("Also on Sunday?", "closed|no", "No, on Sunday we are closed."),
    ),
)
TECHNICAL_SUPPORT = (
    _support(
        "crash",
        "to make the app work",
        ("The app crashes.", "when|version", "When does it crash, and which version is it?"),
        ("When I log in. Version 2.3.", "update|reinstall", "Please update to version 2.4."),
        ("I did. It still crashes.", "log|report", "Please send me the log file."),
    ),
    _support(
        "password",
        "to get into the account",
        ("I forgot my password.", "reset|link", "I will send you a link to reset it."),
        ("No mail came.", "spam", "Please look into your spam folder."),
        ("There it is.", "click|open", "Please click the link in it."),
    ),
    _support(
        "slow",
        "a faster internet",
        ("My internet is slow.", "restart|router", "Please restart your router."),
        ("I did that.", "cable|wifi", "Do you use a cable or wifi?"),
        ("Wifi.", "cable|closer", "Try a cable, or move closer to the router."),
    ),
    _support(
        "printer",
        "to print",
        ("My printer does nothing.", "on|power", "Is it on, and does it have power?"),
        ("Yes. A red light blinks.", "paper|ink", "Then it has no paper or ink."),
        ("The paper was out.", "try|again|print", "Please add some and try again."),
    ),
    _support(
        "sound",
        "to hear something",
        ("I have no sound.", "volume|mute", "Is the volume up, or is it on mute?"),
        ("The volume is up.", "headphones|speaker", "Are your headphones plugged in?"),
        ("Yes, they were. It works now.", "good|glad", "I am glad it works."),
    ),
    _support(
        "disk",
        "free space",
        ("My disk is full.", "delete|remove|clean", "Please delete files you do not need."),
        ("Which ones?", "downloads|large|old", "Begin with large old downloads."),
    ),
)
SALES = (
    _sale(
        "laptop",
        "a laptop for school, below 600 dollars",
        ("I need a laptop.", "what for|use|budget", "What do you use it for, and what is your budget?"),
        ("For school, below 600 dollars.", "recommend|suggest", "I recommend the Pico 14 for 550 dollars."),
        ("Is there a discount?", "student|discount", "Yes, there is a student discount of ten percent."),
    ),
    _sale(
        "price",
        "a lower price",
        ("Your price is too high.", "value|quality|includes", "It includes three years of service."),
        ("Others are cheaper.", "match|offer|compare", "We can match their offer."),
        ("Then I take it.", "thank,order", "Thank you. I will place the order."),
    ),
    _sale(
        "phone_plan",
        "a plan with much data",
        ("Which plan has the most data?", "gold", "The gold plan has the most data."),
        ("What does it cost?", "30|thirty", "It costs 30 dollars a month."),
        ("Can I cancel it?", "any time|month", "Yes, you can cancel at any time."),
    ),
    _sale(
        "gift",
        "a gift for a child",
        ("I look for a gift for a child.", "old|age", "How old is the child?"),
        ("Six.", "puzzle|game|book", "A puzzle or a game would be nice."),
        ("Do you wrap it?", "wrap|yes", "Yes, we wrap it for free."),
    ),
    _sale(
        "demo",
        "to see the product first",
        ("Can I try it first?", "demo|trial", "Yes, we have a free trial."),
        ("For how long?", "days|weeks|month", "For thirty days."),
        ("How do I begin?", "email|sign up", "Please sign up with your email."),
    ),
    _sale(
        "bulk",
        "fifty chairs",
        ("I need fifty chairs.", "discount|offer|price", "For fifty we can offer a discount."),
        ("When can you deliver?", "week|weeks|days", "Within two weeks."),
    ),
)

PRESETS = {
    "customer_service": ConversationPreset(
        "You help the customers of a shop. Answer in one short sentence.", CUSTOMER_SERVICE
    ),
    "technical_support": ConversationPreset(
        "You help people with technical problems. Answer in one short sentence.", TECHNICAL_SUPPORT
    ),
    "sales": ConversationPreset("You sell things, honestly. Answer in one short sentence.", SALES),
}
CONVERSATION_CONFIGS: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS}
"""Arguments of `Conversation`, by domain: `Conversation(**CONVERSATION_CONFIGS["sales"])`."""
