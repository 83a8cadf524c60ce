"""Answers with one right solution: a letter, or a few words. And what breaking off is worth.

An episode that passed a limit (context, turns) has one reward, the penalty, whatever it said before; since rewards are
of episodes, it reaches every branch.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Literal

from arborl.rewards.fields import field_of
from arborl.rewards.numbers import final_part
from arborl.rewards.reward import Reward
from arborl.types import Episode, StopReason

LETTER = re.compile(r"\s*\(?([A-Za-z])(?:[).:]|\s*$)")
ARTICLES = re.compile(r"\b(a|an|the)\b")


class Penalised(Reward):
    """A reward that is only asked for episodes that came to their end.

    Args:
        exceeded: what an episode gets that ran out of context or turns.
        too_few_turns: what one gets that answered before its agent's `min_assistant_turns`.
        invalid: what one gets that gave no answer in the form asked for: no call of `finish`, no letter, too long.
    """

    def __init__(self, exceeded: float = -1.0, too_few_turns: float = -1.0, invalid: float = -1.0):
        self.exceeded, self.too_few_turns, self.invalid = exceeded, too_few_turns, invalid

    async def __call__(self, episode: Episode) -> float | dict[str, float]:
        if episode.stop in (StopReason.CONTEXT_FULL, StopReason.MAX_TURNS):
            return self.exceeded
        if episode.metrics.get("context/too_few_turns", 0.0) > 0:
            return self.too_few_turns
        if episode.metrics.get("context/finished", 1.0) == 0 or not episode.turns:
            return self.invalid
        return await self.judge(episode)

    async def judge(self, episode: Episode) -> float:
        """What the answer is worth."""
        raise TypeError(f"{type(self).__name__} does not say what an answer is worth; give it a method `judge`")


class Choice(Penalised):
    """A question of multiple choice: `right`, `wrong`, or `invalid` where no letter can be read.

    The letter stands at the beginning of the answer: `B`, `B.`, `(B)`, `B. Oslo`.

    Args:
        right: for the letter in the task's field.
        wrong: for another.
        field: that holds the letter.
        exceeded, too_few_turns, invalid: see `Penalised`.
    """

    def __init__(
        self,
        right: float = 1.0,
        wrong: float = -0.5,
        invalid: float = -1.0,
        exceeded: float = -1.0,
        too_few_turns: float = -1.0,
        field: str = "answer",
    ):
        super().__init__(exceeded, too_few_turns, invalid)
        self.right, self.wrong, self.field = right, wrong, field

    async def judge(self, episode: Episode) -> float:
        said = read_letter(final_part(episode.answer))
        if said is None:
            return self.invalid
        known = known_by_environment(episode, self.field)
        if known is not None:
            return self.right if known else self.wrong
        gold = str(field_of(episode, self.field, "reward 'choice'")).strip().upper()
        return self.right if said == gold else self.wrong


class ShortAnswer(Penalised):
    """An answer of a few words, compared with the task's: exactly, or by the words they share (F1).

    Case, punctuation, articles and white space do not matter.

    Args:
        match: `exact`, or `f1` for parts of `right`.
        right: for the right answer.
        wrong: for another.
        field: that holds the answer, or several of which one suffices.
        max_sentences: longer answers are invalid.
        exceeded, too_few_turns, invalid: see `Penalised`.
    """

    def __init__(
        self,
        match: Literal["exact", "f1"] = "exact",
        right: float = 1.0,
        wrong: float = -0.5,
        invalid: float = -1.0,
        exceeded: float = -1.0,
        too_few_turns: float = -1.0,
        field: str = "answer",
        max_sentences: int = 3,
    ):
        if match not in ("exact", "f1"):
            raise ValueError(f"match={match!r}: give exact or f1")
        super().__init__(exceeded, too_few_turns, invalid)
        self.match, self.right, self.wrong = match, right, wrong
        self.field, self.max_sentences = field, max_sentences

    async def judge(self, episode: Episode) -> float:
        said = final_part(episode.answer)
        if not said.strip() or sentences(said) > self.max_sentences:
            return self.invalid
        known = known_by_environment(episode, self.field)
        if known is not None:
            return self.right if known else self.wrong
        gold = field_of(episode, self.field, "reward 'short_answer'")
        golds = [str(one) for one in gold] if isinstance(gold, list | tuple) else [str(gold)]
        score = max((f1 if self.match == "f1" else exactly)(said, one) for one in golds)
        return self.wrong + (self.right - self.wrong) * score


def known_by_environment(episode: Episode, field: str) -> bool | None:
    """Whether the answer is right, by an environment that made the task itself; None where the task has the field."""
    if field in episode.task.fields or "success" not in episode.metrics:
        return None
    return episode.metrics["success"] > 0


def read_letter(text: str) -> str | None:
    """The letter an answer begins with; None where it begins with a word.

    Example:
        read_letter("(b) Oslo"), read_letter("Because")      # 'B', None
    """
    found = LETTER.match(text)
    return found.group(1).upper() if found else None


def normalised(text: str) -> list[str]:
    """Words that count, in small letters.

    Example:
        normalised("The Silver-Lamp!")      # ['silver', 'lamp']
    """
    plain = "".join(" " if sign in string.punctuation else sign for sign in text.casefold())
    return ARTICLES.sub(" ", plain).split()


def exactly(said: str, gold: str) -> float:
    """1 where both have the same words."""
    return float(normalised(said) == normalised(gold))


def f1(said: str, gold: str) -> float:
    """Harmonic mean of how much of what was said is right, and how much of what is right was said.

    Example:
        f1("silver lamp of Mira", "the silver lamp")      # 2 of 4 and 2 of 2: 0.667
    """
    given, wanted = normalised(said), normalised(gold)
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted))


def sentences(text: str) -> int:
    """How many sentences; a text without an end of one is one."""
    return max(len(re.findall(r"[.!?]+(?=\s|$)", text.strip())), 1)
