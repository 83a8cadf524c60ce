"""Customer service, technical support, sales: what good replies of a trade do, each part found by its phrases.

A phrase counts in a sentence of three words or more, once: saying it again gains nothing, and no more than its part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from arborl.errors import did_you_mean
from arborl.rewards.text.backing import Judge, TextReward
from arborl.rewards.text.base import Context, RewardResult
from arborl.rewards.text.general import HelpfulnessReward
from arborl.rewards.text.task import completion
from arborl.rewards.text.turns import Exchange
from arborl.rewards.text.words import asks, linked, parrots, prose, sentences, variety, words

TASK = 0.4
"""Share of the score that expectations have, where the task says some."""


class DomainReward(TextReward):
    """A weighted mean of parts, each 0 to 1, times how much the replies are prose; and halved for every fault found.

    Parts are `helpful`, by `HelpfulnessReward`, and those that a class lists. Where the task says what it expects (see
    `TaskCompletionReward`), that is 0.4 of the score, as `task`.

    Args:
        cues: phrases of your own, by part: other languages, other words. They are looked for beside the English ones.
        weight, name, judge, model: see `TextReward`.
    """

    parts: ClassVar[Mapping[str, float]]
    """Weights of the parts."""
    phrases: ClassVar[Mapping[str, str]]
    """Regular expressions of parts and faults."""
    faults: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        weight: float = 1.0,
        cues: Mapping[str, Sequence[str]] | None = None,
        name: str | None = None,
        judge: Judge | None = None,
        model: str | None = None,
    ):
        super().__init__(weight, name, judge, model)
        own = dict(cues or {})
        for part in own:
            if part not in self.phrases:
                known = ", ".join(self.phrases)
                raise ValueError(
                    f"{self.name}.cues: no part {part!r}.{did_you_mean(part, self.phrases)} Known: {known}."
                )
        self.patterns = {
            part: re.compile(_either(text, own.get(part, ())), re.I) for part, text in self.phrases.items()
        }
        self.helpful = HelpfulnessReward()

    def measure(self, said: Sequence[Exchange], context: Context) -> RewardResult:
        found = {"helpful": self.helpful.measure(said, context).score}
        found |= {part: self.part(part, said) for part in self.parts if part != "helpful"}
        faults = {fault: float(self.says(fault, said)) for fault in self.faults}
        score = sum(weight * found[part] for part, weight in self.parts.items()) / sum(self.parts.values())
        task = completion(said, context) if context.get("user_responses") or context.get("expect") else None
        if task is not None:
            found["task"] = task
            score = (1 - TASK) * score + TASK * task
        fluent = sum(prose(one.reply) for one in said if one.reply) / len(said)
        return RewardResult(score * fluent * 0.5 ** sum(faults.values()), found | faults)

    def part(self, part: str, said: Sequence[Exchange]) -> float:
        """How much of a part there is: whether some reply says it."""
        return float(self.says(part, said))

    def says(self, part: str, said: Sequence[Exchange]) -> bool:
        """Whether a sentence of some reply has one of the part's phrases, other than by repeating the user."""
        return any(
            self.patterns[part].search(sentence) is not None
            for one in said
            for sentence in sentences(one.reply)
            if len(given := words(sentence)) > 2
            and variety(given) * linked(given) > 0.5
            and not parrots(sentence, one.asked)
        )

    def inquires(self, part: str, said: Sequence[Exchange]) -> float:
        """1 for a question with one of the part's phrases, one half for another question."""
        if any(self.patterns[part].search(q) and asks(q, one.asked) for one in said for q in sentences(one.reply)):
            return 1.0
        return 0.5 * any(asks(one.reply, one.asked) for one in said)


def _either(pattern: str, own: Sequence[str]) -> str:
    given = [own] if isinstance(own, str) else own
    return "|".join([pattern, *(rf"(?<!\w){re.escape(cue)}(?!\w)" for cue in given)])


NEXT = (
    r"\b(?:I(?:['’]ll| will| can| have|['’]ve)|we(?:['’]ll| will| can| have|['’]ve)|you can|please|let me"
    r"|shall I|would you like me to) (?:now )?"
)
RUDE = (
    r"\bnot (?:my|our) problem\b|\byour (?:own )?fault\b|\bcalm down\b|\bas I (?:already )?(?:said|told you)\b"
    r"|\byou should have\b|\bstop complaining\b|\bread the (?:manual|instructions)\b"
)


class CustomerServiceReward(DomainReward):
    """Whether replies serve a customer: `helpful` (0.3), `empathy` (0.2: sorry, I understand, thank you for …),
    `resolution` (0.3: something that is done, sent, changed, refunded, or that the customer can do), `information`
    (0.2: asks for what is needed; one half for any other question). `rude` (blame, `calm down`) halves the score.

    It sees phrases, in English unless `cues` says others: not whether the sympathy is meant, the promise is kept, or
    the question is needed.
    """

    rubric = """Is this good customer service? It understands the problem and says so once, without grovelling; asks
for exactly the information that is needed; proposes or does a concrete step that resolves it; is polite and blames
nobody; promises nothing that it cannot keep."""
    parts = {"helpful": 0.3, "empathy": 0.2, "resolution": 0.3, "information": 0.2}
    faults = ("rude",)
    phrases = {
        "empathy": r"\b(?:sorry|apologi[sz]e|apologies|I (?:completely |fully )?understand|I see (?:why|how)"
        r"|thank(?:s| you) for|frustrating|inconvenience)\b",
        "resolution": NEXT
        + r"(?:\w+ )?(?:refund|replace|send|sent|return|exchange|cancel|change|update|book|order|arrange"
        r"|resend|credit|ship|fix|check|look|note|noted|forward|transfer|contact|keep|choose|open|find"
        r"|help you (?:with|by))"
        r"|\bwill (?:arrive|reach you|be (?:with you|delivered|refunded|replaced|there))\b",
        "information": r"\b(?:order|number|address|name|date|e-?mail|account|reason|why|when|which|what)\b",
        "rude": RUDE,
    }

    def part(self, part: str, said: Sequence[Exchange]) -> float:
        return self.inquires(part, said) if part == "information" else super().part(part, said)


class TechnicalSupportReward(DomainReward):
    """Whether replies solve a technical problem: `helpful` (0.25), `diagnosis` (0.25: asks when, which version, which
    message; one half for any other question), `steps` (0.35: something to do, as a list, a command, or an instruction),
    `check` (0.15: whether it works then, or what comes next). `rude` halves the score.

    It sees phrases, in English unless `cues` says others: not whether the steps are right or dangerous.
    """

    rubric = """Is this good technical support? It finds out what is needed to tell the causes apart; gives concrete
steps in the right order, that are likely to help and do no damage; says how to see whether they worked and what to do
otherwise; speaks so that this user can follow."""
    parts = {"helpful": 0.25, "diagnosis": 0.25, "steps": 0.35, "check": 0.15}
    faults = ("rude",)
    phrases = {
        "diagnosis": r"\b(?:version|model|device|system|browser|when|which|error|message|log|see|happens?|tried)\b",
        "steps": r"(?:^|\b(?:please|then|first|next|try|to|you can|and) )(?:re)?(?:start|install|boot|set|open|click"
        r"|select|press|go to|run|type|update|upgrade|check|clear|delete|remove|plug|unplug|connect|disconnect|turn"
        r"|switch|move|download|enter|close|add|send|look)\b",
        "check": r"\b(?:(?:let me know|tell me) (?:if|whether|what|how)|does (?:it|that|this) (?:work|help)|still"
        r"|if (?:it|that|this) (?:does|fails|persists|happens)|works? now|solved)\b",
        "rude": RUDE,
    }

    def part(self, part: str, said: Sequence[Exchange]) -> float:
        if part == "diagnosis":
            return self.inquires(part, said)
        listed = part == "steps" and any(re.search(r"^\s*(?:\d+[.)]|```)", one.reply, re.M) for one in said)
        return float(listed) or super().part(part, said)


class SalesAssistantReward(DomainReward):
    """Whether replies advise a buyer: `helpful` (0.25), `needs` (0.3: asks what for, how many, which budget; one half
    for any other question), `offer` (0.25: recommends something, with a number), `next` (0.2: a way on that leaves the
    choice to the buyer). `pressure` (only today, act now, you must buy, everybody buys) and `rude` each halve the
    score.

    It sees phrases, in English unless `cues` says others: not whether the offer is true, fair, or fits.
    """

    rubric = """Is this honest, good sales advice? It finds out what the buyer needs and can spend; recommends what
fits and says why, with price and limits; answers objections with facts; leaves the choice to the buyer. Pressure, false
scarcity, flattery and claims that cannot be known are worth 0."""
    parts = {"helpful": 0.25, "needs": 0.3, "offer": 0.25, "next": 0.2}
    faults = ("pressure", "rude")
    phrases = {
        "needs": r"\b(?:need|use|budget|looking for|prefer|how (?:many|much|often|old)|what for|for whom|which|size)\b",
        "offer": r"\b(?:recommend|suggest|offer|costs?|price|includes?|plan|option|discount|fits?|suits?)\b",
        "next": r"\b(?:would you like|shall I|you can (?:try|order|cancel|return|sign up|compare)|trial|demo"
        r"|if you (?:like|want)|let me know|take your time|I will (?:place|send|prepare)"
        r"|happy to (?:send|show|compare))\b",
        "pressure": r"\b(?:only today|today only|act (?:now|fast)|last chance|buy (?:it )?now|hurry"
        r"|before it(?:['’]s| is) too late|you (?:must|have to|need to) buy|every(?:one|body) (?:is buying|buys|has)"
        r"|don['’]t miss|limited time"
        r"|you(?:['’]ll| will) regret|risk[- ]free|100 ?% guaranteed)\b",
        "rude": RUDE,
    }

    def part(self, part: str, said: Sequence[Exchange]) -> float:
        if part == "needs":
            return self.inquires(part, said)
        found = super().part(part, said)
        if part == "offer" and found:  # a number makes it one that can be compared
            return 1.0 if any(re.search(r"\d", one.reply) for one in said) else 0.5
        return found
