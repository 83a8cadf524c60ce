"""Whether the conversation did what it was for: the right answer, the goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from arborl.envs.games.conversation import UserLine
from arborl.envs.games.conversation_presets import read_scenario
from arborl.rewards.choice import exactly, f1, read_letter
from arborl.rewards.numbers import equal, final_part, read_number
from arborl.rewards.text.backing import Judge, TextReward
from arborl.rewards.text.base import Context, RewardResult, finite
from arborl.rewards.text.turns import Exchange
from arborl.rewards.text.words import parrots, prose, telling, words

FIELDS = ("expected", "answer")


class CorrectnessReward(TextReward):
    """Whether the last reply gives the expected answer: the task's field `expected`, else `answer`.

    A number must be the last of the reply, however it is written; a letter from a choice must begin it; a text must be
    the reply, or with `match="f1"` shares words with it (harmonic mean of how much of the reply is expected and how
    much of what is expected is there, so naming every possible answer gains little). The end of a longer reply counts:
    `<answer>…</answer>`, `\\boxed{…}`, what follows `answer is`, or the last line.

    It cannot see that two texts mean the same, nor that a right answer was reached wrongly.

    Args:
        match: `f1`, or `exact` for 0 or 1.
        field: that holds the answer, or several right ones; also looked for in the scenario's `metadata`.
        tolerance: how far a number may be off, as a share of the right one.
        missing: score of a conversation without such a field; by default that is an error and costs the episode.
        weight, name, judge, model: see `TextReward`.
    """

    rubric = """Is what the assistant says at the end right? Compare with the expected answer where one is given:
    wording
does not matter, facts do. 10: right; 0: wrong, missing, or hedged among several answers."""

    def __init__(
        self,
        weight: float = 1.0,
        match: Literal["f1", "exact"] = "f1",
        field: str | None = None,
        tolerance: float = 0.0,
        missing: float | None = None,
        name: str | None = None,
        judge: Judge | None = None,
        model: str | None = None,
    ):
        super().__init__(weight, name, judge, model)
        if match not in ("f1", "exact"):
            raise ValueError(f"{self.name}.match={match!r}: give f1 or exact")
        self.match, self.fields = match, (field,) if field else FIELDS
        self.tolerance = Fraction(finite(tolerance, f"{self.name}.tolerance", 0))
        self.missing = None if missing is None else finite(missing, f"{self.name}.missing")

    def measure(self, said: Sequence[Exchange], context: Context) -> RewardResult:
        wanted = next((one for field in self.fields if (one := lookup(context, field)) not in (None, "", [], ())), None)
        if wanted is None:
            return _missing(self.name, f"the field {' or '.join(map(repr, self.fields))}", context, self.missing)
        options: Sequence[Any] = wanted if isinstance(wanted, list | tuple) else [wanted]
        reply = final_part(said[-1].reply)
        return RewardResult(max((self._like(reply, str(one)) for one in options), default=0.0))

    def _like(self, reply: str, wanted: str) -> float:
        if not words(reply):
            return 0.0
        if len(wanted.strip()) == 1 and wanted.strip().isalpha():
            return float(read_letter(reply) == wanted.strip().upper())
        if read_number(wanted) is not None:
            return float(equal(reply, wanted, self.tolerance))
        if equal(reply, final_part(wanted)) or exactly(reply, wanted):
            return 1.0
        return f1(reply, wanted) if self.match == "f1" else 0.0


class TaskCompletionReward(TextReward):
    """How much of what the conversation was for was done. The first of these that the task has:

    - expectations of a scenario's lines (`user_responses` with `expect`): the share of lines whose reply mentions them;
    - what the environment measured of them (`met`, or `success`), where it drew the scenario itself;
    - `expect`, a list for the whole conversation: the share that some reply mentions;
    - `goal`: the share of its longer words that replies mention. That is weak: better give expectations, or a judge.

    A reply that is only the user's words, or catchwords in a row, counts less or nothing. It sees that something is
    mentioned, not that it is true, or that it was done.

    Args:
        missing: score of a conversation with none of these; by default that is an error and costs the episode.
        weight, name, judge, model: see `TextReward`.
    """

    rubric = """Did the user get what they came for? Look at the goal and at what is expected, where they are given.
10: all of it is done or clearly on its way; 5: half; 0: nothing, or the wrong thing. Claims of having done something
count only where the conversation makes them believable."""

    def __init__(
        self,
        weight: float = 1.0,
        missing: float | None = None,
        name: str | None = None,
        judge: Judge | None = None,
        model: str | None = None,
    ):
        super().__init__(weight, name, judge, model)
        self.missing = None if missing is None else finite(missing, f"{self.name}.missing")

    def measure(self, said: Sequence[Exchange], context: Context) -> RewardResult:
        score = completion(said, context)
        if score is None:
            return _missing(self.name, "expectations ('user_responses', 'expect') or a 'goal'", context, self.missing)
        return RewardResult(score)


def completion(said: Sequence[Exchange], context: Context) -> float | None:
    """The share of what was expected that was done; None where nothing is known about that."""
    lines = [line for line in _lines(context) if line.expect]
    if lines:
        return sum(_met(line, said) for line in lines) / len(lines)
    measured = context.get("metrics")
    for key in ("met", "success"):
        if isinstance(measured, Mapping) and key in measured:
            return min(max(float(measured[key]), 0.0), 1.0)
    expect = lookup(context, "expect")
    wanted = [expect] if isinstance(expect, str) else list(expect or ())
    if wanted:
        anywhere = [UserLine("", (str(one),)) for one in wanted]
        return sum(_met(line, said) for line in anywhere) / len(anywhere)
    goal = telling(str(lookup(context, "goal") or ""))
    if goal:
        best = (max((_worth(one) for one in said if word in telling(one.reply)), default=0.0) for word in sorted(goal))
        return sum(best) / len(goal)
    return None


def _lines(context: Context) -> Sequence[UserLine]:
    given = context.get("user_responses")
    return read_scenario({"user_responses": given}, "context").lines if given else ()


def _met(line: UserLine, said: Sequence[Exchange]) -> float:
    """What the best reply to a line is worth, if it mentions what is expected."""
    return max((_worth(one) for one in said if line.text in one.asked and line.met_by(one.reply)), default=0.0)


def _worth(one: Exchange) -> float:
    return 0.0 if parrots(one.reply, one.asked) else prose(one.reply)


def lookup(context: Context, field: str) -> Any:
    """A field of the task, or of its `metadata`; None where there is none."""
    within = context.get("metadata")
    return context.get(field, within.get(field) if isinstance(within, Mapping) else None)


def _missing(name: str, what: str, context: Context, instead: float | None) -> RewardResult:
    if instead is None:
        has = ", ".join(key for key in context if key != "metrics") or "none"
        raise LookupError(f"reward {name!r} wants {what}; this task has: {has}. Or give missing=NUMBER, or a judge.")
    return RewardResult(instead, metadata={"why": f"no {what}"})
