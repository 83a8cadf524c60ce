"""Three shelves of scenarios to begin with: customer service, technical support, sales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arborl.envs.conversation.scenario import Line, Persona, Scenario

PERSONAS = (
    Persona("plain", "You are matter-of-fact."),
    Persona("polite", "You are polite and patient.", "Thank you in advance."),
    Persona("impatient", "You are in a hurry and easily annoyed.", "Please be quick."),
    Persona("unsure", "You are unsure of yourself and ask for reassurance.", "I am not sure I am right here."),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A domain: what the agent is told, what users come with, who they are."""

    system: str
    scenarios: tuple[Scenario, ...]
    personas: tuple[Persona, ...] = PERSONAS


def _scenario(topic: str, id: str, goal: str, *lines: tuple[str, str, str]) -> Scenario:
    """Each line: what the user says, what a good reply mentions (with commas between), a good reply."""
    made = tuple(Line(text, tuple(expect.split(",")) if expect else (), reply) for text, expect, reply in lines)
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
    "customer_service": Preset("You help the customers of a shop. Answer in one short sentence.", CUSTOMER_SERVICE),
    "technical_support": Preset(
        "You help people with technical problems. Answer in one short sentence.", TECHNICAL_SUPPORT
    ),
    "sales": Preset("You sell things, honestly. Answer in one short sentence.", SALES),
}
CONVERSATION_CONFIGS: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS}
"""Arguments of `Conversation`, by domain: `Conversation(**CONVERSATION_CONFIGS["sales"])`."""
