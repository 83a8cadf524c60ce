"""Rewards for customer service, technical support and sales: weighted parts, each matched by its phrases."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from arborl.errors import did_you_mean
from arborl.rewards.text.library_rewards import HelpfulnessReward, completion_share
from arborl.rewards.text.text_measures import (
    Exchange,
    function_word_score,
    has_question,
    is_echo,
    lexical_variety,
    prose_score,
    sentences,
    words,
)
from arborl.rewards.text.text_reward import Context, JudgeSpec, RewardResult, TextReward

TASK_SHARE = 0.4
"""Share of the task's expectations in the score, if it has some."""


class DomainReward(TextReward):
    """A weighted mean of parts, each 0 to 1, times the prose score of the replies, halved for every fault.

    Parts are `helpful` (`HelpfulnessReward`) and those of the class. A phrase counts once, in a sentence of three words
    or more. If the task has expectations (see `TaskCompletionReward`), they are 0.4 of the score, as `task`.

    Args:
        cues: further phrases by part, for example of other languages.
        weight, name, judge, model: see `TextReward`.
    """

    parts: ClassVar[Mapping[str, float]]
    """Weights of the parts."""
    phrases: ClassVar[Mapping[str, str]]
    """Regular expression of each part and fault."""
    faults: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        weight: float = 1.0,
        cues: Mapping[str, Sequence[str]] | None = None,
        name: str | None = None,
        judge: JudgeSpec | None = None,
        model: str | None = None,
    ):
        super().__init__(weight, name, judge, model)
        cues = dict(cues or {})
        for part in cues:
            if part not in self.phrases:
                known = ", ".join(self.phrases)
                raise ValueError(
                    f"{self.name}.cues: no part {part!r}.{did_you_mean(part, self.phrases)} Known: {known}."
                )
        self.patterns = {
            part: re.compile(_with_cues(text, cues.get(part, ())), re.I) for part, text in self.phrases.items()
        }
        self.helpful = HelpfulnessReward()

    def measure(self, exchanges: Sequence[Exchange], context: Context) -> RewardResult:
        parts = {"helpful": self.helpful.measure(exchanges, context).score}
        parts |= {part: self.part(part, exchanges) for part in self.parts if part != "helpful"}
        faults = {fault: float(self.matches(fault, exchanges)) for fault in self.faults}
        score = sum(weight * parts[part] for part, weight in self.parts.items()) / sum(self.parts.values())
        task = completion_share(exchanges, context) if context.get("user_responses") or context.get("expect") else None
        if task is not None:
            parts["task"] = task
            score = (1 - TASK_SHARE) * score + TASK_SHARE * task
        prose = sum(prose_score(one.reply) for one in exchanges if one.reply) / len(exchanges)
        return RewardResult(score * prose * 0.5 ** sum(faults.values()), parts | faults)

    def part(self, part: str, exchanges: Sequence[Exchange]) -> float:
        """The score of a part: whether some reply has it."""
        return float(self.matches(part, exchanges))

    def matches(self, part: str, exchanges: Sequence[Exchange]) -> bool:
        """Whether a sentence of some reply, that does not repeat the user, matches the part."""
        return any(
            self.patterns[part].search(sentence) is not None
            for one in exchanges
            for sentence in sentences(one.reply)
            if len(tokens := words(sentence)) > 2
            and lexical_variety(tokens) * function_word_score(tokens) > 0.5
            and not is_echo(sentence, one.user)
        )

    def question_score(self, part: str, exchanges: Sequence[Exchange]) -> float:
        """1 for a question that matches the part, 1/2 for another question."""
        if any(
            self.patterns[part].search(q) and has_question(q, one.user)
            for one in exchanges
            for q in sentences(one.reply)
        ):
            return 1.0
        return 0.5 * any(has_question(one.reply, one.user) for one in exchanges)


def _with_cues(pattern: str, cues: Sequence[str]) -> str:
    cues = [cues] if isinstance(cues, str) else cues
    return "|".join([pattern, *(rf"(?<!\w){re.escape(cue)}(?!\w)" for cue in cues)])


COMMITMENT = (
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
    (0.2: asks for what is needed; 1/2 for any other question). `rude` (blame, `calm down`) halves the score.

    It matches English phrases and `cues`; it does not measure sincerity or truth.
    """

    rubric = """Is this good customer service? It understands the problem and says so once, without grovelling; asks
for exactly the information that is needed; proposes or does a concrete step that resolves it; is polite and blames
nobody; promises nothing that it cannot keep."""
    parts = {"helpful": 0.3, "empathy": 0.2, "resolution": 0.3, "information": 0.2}
    faults = ("rude",)
    phrases = {
        "empathy": r"\b(?:sorry|apologi[sz]e|apologies|I (?:completely |fully )?understand|I see (?:why|how)"
        r"|thank(?:s| you) for|frustrating|inconvenience)\b",
        "resolution": COMMITMENT
        + r"(?:\w+ )?(?:refund|replace|send|sent|return|exchange|cancel|change|update|book|order|arrange"
        r"|resend|credit|ship|fix|check|look|note|noted|forward|transfer|contact|keep|choose|open|find"
        r"|help you (?:with|by))"
        r"|\bwill (?:arrive|reach you|be (?:with you|delivered|refunded|replaced|there))\b",
        "information": r"\b(?:order|number|address|name|date|e-?mail|account|reason|why|when|which|what)\b",
        "rude": RUDE,
    }

    def part(self, part: str, exchanges: Sequence[Exchange]) -> float:
        return self.question_score(part, exchanges) if part == "information" else super().part(part, exchanges)


class TechnicalSupportReward(DomainReward):
    """Whether replies solve a technical problem: `helpful` (0.25), `diagnosis` (0.25: asks when, which version, which
    message; 1/2 for any other question), `steps` (0.35: something to do, as a list, a command, or an instruction),
    `check` (0.15: whether it works then, or what comes next). `rude` halves the score.

    It matches English phrases and `cues`; it does not measure whether the steps are right.
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

    def part(self, part: str, exchanges: Sequence[Exchange]) -> float:
        if part == "diagnosis":
            return self.question_score(part, exchanges)
        has_list = part == "steps" and any(re.search(r"^\s*(?:\d+[.)]|```)", one.reply, re.M) for one in exchanges)
        return float(has_list) or super().part(part, exchanges)


class SalesAssistantReward(DomainReward):
    """Whether replies advise a buyer: `helpful` (0.25), `needs` (0.3: asks what for, how many, which budget; one half
    for any other question), `offer` (0.25: recommends something, with a number), `next` (0.2: a way on that leaves the
    choice to the buyer). `pressure` (only today, act now, you must buy, everybody buys) and `rude` each halve the
    score.

    It matches English phrases and `cues`; it does not measure whether the offer is true.
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

    def part(self, part: str, exchanges: Sequence[Exchange]) -> float:
        if part == "needs":
            return self.question_score(part, exchanges)
        score = super().part(part, exchanges)
        if part == "offer" and score:  # an offer needs a number
            return 1.0 if any(re.search(r"\d", one.reply) for one in exchanges) else 0.5
        return score
