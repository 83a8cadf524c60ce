"""How well somebody talks, whatever it is about: helpful, brief, engaged.

None of them knows whether what was said is true, or what was meant. They are counts of words, made so that saying more,
saying it again, saying the user's words and saying catchwords gain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from arborl.rewards.text.backing import Judge, TextReward, mean
from arborl.rewards.text.base import Context, RewardResult, finite
from arborl.rewards.text.turns import Exchange
from arborl.rewards.text.words import asks, fresh, length, prose, telling, words

HALF = 2.0
"""New words at which substance is one half."""


class HelpfulnessReward(TextReward):
    """Whether replies say something of their own about what was asked.

    Of each reply, multiplied; the score is their mean:

    - `substance`: n / (n + 2), where n counts different words of four letters or more, and numbers, that the user has
      not said. An echo has none; from ten on, more hardly count.
    - `relevance`: 1/2, and up to 1 with two words of the user's message, or all where it has fewer.
    - `prose`: words vary and are joined to sentences; catchwords in a row, or one again and again, are not.
    - `fresh`: 1 less how alike it is to the user's message, or to an earlier reply of the conversation.
    - `brief`: beyond `long` words, `long` over their number.

    It cannot see whether an answer is right, kind, or meant for the question, and takes set phrases for words like
    others; a right answer of one word has 0.33 at most.

    Args:
        long: words beyond which a reply loses.
        weight, name, judge, model: see `TextReward`.
    """

    rubric = """Does each reply help the user with what they asked? It answers the question or does the next useful
step, is specific, correct as far as you can tell, and easy to follow. Length by itself is worth nothing; politeness
without substance is worth little; repeating the user's words is worth nothing."""

    def __init__(
        self,
        weight: float = 1.0,
        long: int = 300,
        name: str | None = None,
        judge: Judge | None = None,
        model: str | None = None,
    ):
        super().__init__(weight, name, judge, model)
        self.long = finite(long, f"{self.name}.long", 1)

    def measure(self, said: Sequence[Exchange], context: Context) -> RewardResult:
        return mean([self._of(one, unheard) for one, unheard in zip(said, fresh(said), strict=True)])

    def _of(self, one: Exchange, unheard: float) -> dict[str, float]:
        theirs, ours = telling(one.asked), telling(one.reply)
        new = len(ours - set(words(one.asked)))
        parts = {
            "substance": new / (new + HALF),
            "relevance": 0.5 + 0.5 * (min(len(theirs & ours) / min(len(theirs), 2), 1.0) if theirs else 1.0),
            "prose": prose(one.reply),
            "fresh": unheard,
            "brief": min(self.long / max(length(one.reply), 1.0), 1.0),
        }
        return parts | {"score": _product(parts)}


class ConcisenessReward(TextReward):
    """Whether replies are brief: 1 up to `words` words, beyond that `words` over their number; less where they repeat
    themselves, each other or the user.

    It cannot see whether anything is missing: a reply of one word is as brief as can be. Give it a small weight beside
    rewards that want something to be said.

    Args:
        words: up to which a reply is brief. Two signs of a script without spaces count as one; code counts too.
        weight, name, judge, model: see `TextReward`.
    """

    rubric = """Is each reply as short as it can be and still complete? No repetition, no filler, no restating of the
question. A reply that leaves out what the user needs is not concise, it is incomplete: score it low."""

    def __init__(
        self,
        weight: float = 1.0,
        words: int = 80,
        name: str | None = None,
        judge: Judge | None = None,
        model: str | None = None,
    ):
        super().__init__(weight, name, judge, model)
        self.words = finite(words, f"{self.name}.words", 1)

    def measure(self, said: Sequence[Exchange], context: Context) -> RewardResult:
        return mean([self._of(one.reply, unheard) for one, unheard in zip(said, fresh(said), strict=True)])

    def _of(self, reply: str, unheard: float) -> dict[str, float]:
        parts = {"brief": min(self.words / max(length(reply), 1.0), 1.0), "prose": prose(reply), "fresh": unheard}
        return parts | {"score": _product(parts) if words(reply) else 0.0}


class EngagementReward(TextReward):
    """Whether replies keep a conversation going.

    Of each reply, the mean of the first two times the other two; the score is the mean over replies:

    - `takes_up`: it has a word of the user's message, and as many of its own.
    - `invites`: it asks a question of its own, in three words or more, and no sentence of the user's. One is enough.
    - `fresh`: 1 less how alike it is to the user's message, or to an earlier reply of the conversation.
    - `prose`: words vary and are joined to sentences.

    It cannot see whether a question is a good one, or whether the user would rather be left alone.

    Args:
        weight, name, judge, model: see `TextReward`.
    """

    rubric = """Do the replies keep a good conversation going? They take up what the user said, add something, and ask
one fitting question where more should be known. Empty enthusiasm and question after question are worth nothing; where
the user wants to end, letting them go is right."""

    def measure(self, said: Sequence[Exchange], context: Context) -> RewardResult:
        return mean([self._of(one, unheard) for one, unheard in zip(said, fresh(said), strict=True)])

    def _of(self, one: Exchange, unheard: float) -> dict[str, float]:
        theirs, ours = telling(one.asked), telling(one.reply)
        shared, new = len(theirs & ours), len(ours - set(words(one.asked)))
        parts = {
            "takes_up": min(new / max(shared, 1), 1.0) if shared or not theirs else 0.0,
            "invites": float(asks(one.reply, one.asked)),
        }
        fluent = prose(one.reply) if words(one.reply) else 0.0
        score = fluent * unheard * sum(parts.values()) / 2
        return parts | {"fresh": unheard, "prose": fluent, "score": score}


def _product(parts: dict[str, float]) -> float:
    score = 1.0
    for value in parts.values():
        score *= value
    return score
