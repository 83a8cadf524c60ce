"""Rewards of the final answer: as a number, as text, as a letter, by its format; and the environment's own reward."""

from __future__ import annotations

import re
import string
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from arborl.rewards.reward import Reward, reward
from arborl.types import Episode, StopReason

# ------------------------------------------------------------------------------------------------ finding the answer

PHRASE = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)+\s*([^\n]+)", re.IGNORECASE)


def field_of(episode: Episode, name: str, who: str) -> Any:
    """A field of the task; LookupError with the known fields if it is missing."""
    fields = episode.task.fields
    if name not in fields:
        raise LookupError(
            f"{who} needs the field {name!r}; task {episode.task.id!r} has: {', '.join(fields) or 'none'}"
        )
    return fields[name]


def last_tagged(text: str, *names: str) -> str | None:
    """The text in the last of these tags that is closed, or None. One pass: a model may open many tags."""
    marks = list(re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", text))
    last_close = {mark[2]: mark.start() for mark in marks if mark[1]}
    inside, opening = None, None
    for mark in marks:
        if opening is None and not mark[1] and last_close.get(mark[2], -1) > mark.start():
            opening = mark
        elif opening is not None and mark[1] and mark[2] == opening[2]:
            inside, opening = text[opening.end() : mark.start()], None
    return inside


def last_boxed(text: str) -> str | None:
    """The text in the last `\\boxed{…}`, with nested braces; None if none is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for at in range(begin - 1, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[begin:at]
    return None


def final_part(text: str) -> str:
    """The answer: the last `<answer>` or `\\boxed{}`, the text after `####` or `answer is`, or the last line."""
    answer = last_tagged(text, "answer")
    tagged, text = answer is not None, text if answer is None else answer
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        text = text.rpartition("####")[2]
    elif not tagged and (phrases := PHRASE.findall(text)):
        text = phrases[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (" ".join(lines) if tagged else lines[-1]) if lines else ""


# ------------------------------------------------------------------------------------------------ numbers

MAX_DIGITS, MAX_EXPONENT = 400, 400
SPACED = r"\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)"
DECIMAL = rf"(?:{SPACED}|\d[\d,_]*\d|\d)(?:\.\d+)?|\.\d+"
SIGN = r"(?:(?<![\w)\].])[-+])?"
NUMBER = re.compile(
    rf"""(?P<sign>{SIGN})(?:[$€£]\s?(?P<inner>[-+]?))?
    (?:(?P<whole>\d+)\s?)?\\[dt]?frac\{{(?P<top>[-+]?[\d.,]+)\}}\{{(?P<bottom>[\d.,]+)\}}
    |(?P<sign2>{SIGN})(?:[$€£]\s?(?P<inner2>[-+]?))?
    (?:(?P<whole2>\d+)[ ](?=\d+/\d))?(?P<number>{DECIMAL})
    (?:[eE](?P<exponent>[-+]?\d+)(?![\w.])|\s?(?:\\times|\\cdot|[×*x])\s?10\^\{{?(?P<power>[-+]?\d+)\}}?)?
    (?:\s?/\s?(?P<over>\d[\d,]*(?:\.\d+)?))?""",
    re.VERBOSE,
)
PERCENT = re.compile(r"\s?(?:%|percent\b|per\s?cent\b)", re.IGNORECASE)
GROUPED = re.compile(r"\d{1,3}([,_ \u00a0\u2009\u202f])\d{3}(?:\1\d{3})*")
LATEX = (("\\!", ""), ("\\,", ""), ("\\%", "%"), ("\\$", "$"), ("{,}", ","), ("−", "-"), ("－", "-"), ("$$", ""))


@dataclass(frozen=True, slots=True)
class ParsedNumber:
    """A number as written."""

    value: Fraction
    percent: bool = False
    """A `%` follows; `value` is the number before it."""


def equal(answer: str, expected: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Whether an answer equals the expected one: as a number if that is one, else as text."""
    right = read_number(expected)
    if right is None:
        return plain_text(answer) == plain_text(expected)
    number = last_number(answer)
    return number is not None and same_number(number, right, tolerance)


def same_number(a: ParsedNumber, b: ParsedNumber, tolerance: Fraction = Fraction(0)) -> bool:
    """Equal as written. A percentage also equals its hundredth."""
    pairs = [(a.value, b.value)]
    if a.percent != b.percent:
        pairs.append((a.value / 100, b.value) if a.percent else (a.value, b.value / 100))
    return any(abs(x - y) <= tolerance * max(abs(y), Fraction(1)) for x, y in pairs)


def read_number(text: str) -> ParsedNumber | None:
    """The number that the whole text is, or None."""
    text = clean(text).strip().rstrip(" .$€£")
    match = NUMBER.match(text)
    return _value(match, text) if match and not PERCENT.sub("", text[match.end() :], count=1).strip() else None


def last_number(text: str) -> ParsedNumber | None:
    """The last number in a text; None if there is none or it is malformed."""
    text = clean(text)
    matches = deque(NUMBER.finditer(text), maxlen=1)
    return _value(matches[0], text) if matches else None


def plain_text(text: str) -> str:
    """The text without LaTeX text commands, surrounding punctuation, case and repeated white space."""
    text = re.sub(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    return " ".join(text.split()).strip(" .\"'`$").casefold()


def clean(text: str) -> str:
    for latex, plain in LATEX:
        text = text.replace(latex, plain)
    return text


def _value(match: re.Match[str], text: str) -> ParsedNumber | None:
    part = match.groupdict()
    negative = "-" in (part["sign"] or "", part["inner"] or "", part["sign2"] or "", part["inner2"] or "")
    if part["top"] is not None:
        top, bottom, whole = _decimal(part["top"].lstrip("+-")), _decimal(part["bottom"]), part["whole"]
        negative ^= part["top"].startswith("-")
    else:
        top, whole = _decimal(part["number"]), part["whole2"]
        bottom = _decimal(part["over"]) if part["over"] else Fraction(1)
        exponent = int((part["exponent"] or part["power"] or "0")[:8])
        if abs(exponent) > MAX_EXPONENT:
            return None
        top = top * Fraction(10) ** exponent if top is not None else None
    if top is None or not bottom or (whole is not None and len(whole) > MAX_DIGITS):
        return None
    value = top / bottom + (int(whole) if whole else 0)
    return ParsedNumber(-value if negative else value, PERCENT.match(text, match.end()) is not None)


def _decimal(digits: str) -> Fraction | None:
    """Digits with or without valid thousands separators."""
    whole, point, rest = digits.partition(".")
    if whole and not whole.isdecimal():
        if not GROUPED.fullmatch(whole):
            return None
        whole = re.sub(r"\D", "", whole)
    if len(whole) + len(rest) > MAX_DIGITS or not (whole or rest) or (rest and not rest.isdecimal()):
        return None
    return Fraction(f"{whole or 0}{point if rest else ''}{rest}")


# ------------------------------------------------------------------------------------------------ simple rewards

POSTED = "endpoint/reward"
"""Metric with the reward that a program of agent `endpoint` has posted."""


@reward(blocking=False)
def environment(episode: Episode) -> float:
    """The sum of the environment's rewards over the turns. Its short name is `env`."""
    return sum(turn.reward for turn in episode.turns)


environment.by_turn = True


@reward(blocking=False)
def posted(episode: Episode) -> float:
    """The reward that the program posted, with agent `endpoint`."""
    if POSTED not in episode.metrics:
        raise LookupError(
            'the program posted no reward. POST {"reward": 1.0} to $ARBORL_EPISODE_URL/reward before it ends, or '
            "choose another reward"
        )
    return episode.metrics[POSTED]


@reward(blocking=False)
def exact(episode: Episode, answer: Any) -> float:
    """1 if the final answer is the task's `answer`, else 0. `1,000` equals `1000.0`; white space does not matter."""
    return float(same_answer(final_part(episode.answer), str(answer)))


def same_answer(answer: str, expected: str) -> bool:
    """Equal as text or, if both are numbers, as numbers."""
    left, right = read_number(answer), read_number(expected)
    if left is not None and right is not None:
        return same_number(left, right)
    return " ".join(answer.split()) == " ".join(expected.split())


@dataclass(eq=False)
class Equal:
    """1 if the final answer equals the task's answer, else 0.

    If the task's answer is a number, the last number of the final answer is compared exactly: `-1,234.50`,
    `\\boxed{3/4}`, `\\frac{3}{4}`, `75%` and `1.5e3` are parsed. Else the texts are compared without case, white space
    and a final full stop. `50%` equals `50` and `0.5`.

    Example:
        rewards: [{name: equal, args: {tolerance: 0.001}}]
    """

    name = "equal"

    tolerance: float = 0.0
    """Relative error of a number (absolute for numbers below 1)."""
    field: str = "answer"
    """Of the task; a list holds several right answers."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance}: give 0 or more, below 1")

    async def __call__(self, episode: Episode) -> float:
        expected = field_of(episode, self.field, f"reward {self.name!r}")
        options: Sequence[Any] = expected if isinstance(expected, list | tuple) else [expected]
        answer = final_part(episode.answer)
        return float(any(equal(answer, final_part(str(one)), Fraction(self.tolerance)) for one in options))


FORMAT_FAILURES = ("tool/malformed", "tool/unknown_tool", "tool/arguments")


@dataclass(eq=False)
class Format:
    """`good` if the format is right, else `bad`.

    Give it a small weight beside a reward for correctness.

    Example:
        rewards: [equal, {name: format, weight: 0.1, args: {pattern: "<think>.*</think>\\\\s*<answer>.*</answer>"}}]
    """

    name = "format"

    pattern: str | None = None
    """Regular expression that the whole last message must match, without surrounding white space; a dot matches any
    character. By default the message must have exactly one non-empty `<answer>…</answer>`."""
    tools: bool = True
    """A malformed or unknown tool call, or one with wrong arguments, is bad too."""
    good: float = 1.0
    bad: float = 0.0
    """`good`, `bad`: The two values."""

    def __post_init__(self) -> None:
        try:
            self._pattern = None if self.pattern is None else re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}") from error

    async def __call__(self, episode: Episode) -> float:
        has_failed = self.tools and any(episode.metrics.get(name, 0.0) > 0 for name in FORMAT_FAILURES)
        return self.good if not has_failed and self._matches(episode.answer.strip()) else self.bad

    def _matches(self, text: str) -> bool:
        if self._pattern is not None:
            return self._pattern.fullmatch(text) is not None
        inside = text.partition("<answer>")[2].partition("</answer>")[0]
        return text.count("<answer>") == text.count("</answer>") == 1 and bool(inside.strip())


# --------------------------------------------------------------------------------------------- choices, short answers

LETTER = re.compile(r"\s*\(?([A-Za-z])(?:[).:]|\s*$)")
ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(eq=False)
class PenalizedReward(Reward):
    """Base class: an episode that exceeded a limit gets a penalty instead of a reward."""

    right: float = 1.0
    wrong: float = -0.5
    """`right`, `wrong`: Values of the right answer and of another one."""
    invalid: float = -1.0
    """Value if the answer has the wrong format: no call of `finish`, no letter, too long."""
    exceeded: float = -1.0
    """Value if the episode ran out of context or turns."""
    too_few_turns: float = -1.0
    """Value if it answered before its agent's `min_assistant_turns`."""
    field: str = "answer"
    """Of the task, with the right answer."""

    async def __call__(self, episode: Episode) -> float | dict[str, float]:
        if episode.stop in (StopReason.CONTEXT_FULL, StopReason.MAX_TURNS):
            return self.exceeded
        if episode.metrics.get("context/too_few_turns", 0.0) > 0:
            return self.too_few_turns
        if episode.metrics.get("context/finished", 1.0) == 0 or not episode.turns:
            return self.invalid
        return await self.judge(episode)

    async def judge(self, episode: Episode) -> float:
        raise TypeError(f"{type(self).__name__} needs a method `judge` that returns the value of an answer")


class MultipleChoice(PenalizedReward):
    """Multiple choice: `right`, `wrong`, or `invalid` if the answer begins with no letter (`B`, `(B)`, `B. Oslo`)."""

    async def judge(self, episode: Episode) -> float:
        letter = read_letter(final_part(episode.answer))
        if letter is None:
            return self.invalid
        is_right = environment_verdict(episode, self.field)
        if is_right is None:
            is_right = letter == str(field_of(episode, self.field, "reward 'choice'")).strip().upper()
        return self.right if is_right else self.wrong


@dataclass(eq=False)
class ShortAnswer(PenalizedReward):
    """An answer of a few words, compared exactly or by common words (F1), without case, punctuation and articles."""

    match: Literal["exact", "f1"] = "exact"
    """`exact`, or `f1` for values between `wrong` and `right`."""
    max_sentences: int = 3
    """Longer answers are invalid."""

    def __post_init__(self) -> None:
        if self.match not in ("exact", "f1"):
            raise ValueError(f"match={self.match!r}: give exact or f1")

    async def judge(self, episode: Episode) -> float:
        answer = final_part(episode.answer)
        if not answer.strip() or count_sentences(answer) > self.max_sentences:
            return self.invalid
        is_right = environment_verdict(episode, self.field)
        if is_right is not None:
            return self.right if is_right else self.wrong
        gold = field_of(episode, self.field, "reward 'short_answer'")
        golds = [str(one) for one in gold] if isinstance(gold, list | tuple) else [str(gold)]
        score = max((f1 if self.match == "f1" else exact_match)(answer, one) for one in golds)
        return self.wrong + (self.right - self.wrong) * score


def environment_verdict(episode: Episode, field: str) -> bool | None:
    """Whether the environment, which made the task, reports success; None if the task has the field."""
    if field in episode.task.fields or "success" not in episode.metrics:
        return None
    return episode.metrics["success"] > 0


def read_letter(text: str) -> str | None:
    """The letter at the beginning of an answer; None if it begins with a word."""
    match = LETTER.match(text)
    return match.group(1).upper() if match else None


def normalized_words(text: str) -> list[str]:
    plain = "".join(" " if sign in string.punctuation else sign for sign in text.casefold())
    return ARTICLES.sub(" ", plain).split()


def exact_match(answer: str, gold: str) -> float:
    return float(normalized_words(answer) == normalized_words(gold))


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words."""
    answer_words, gold_words = normalized_words(answer), normalized_words(gold)
    if not answer_words or not gold_words:
        return float(answer_words == gold_words)
    shared = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * shared / (len(answer_words) + len(gold_words))


def count_sentences(text: str) -> int:
    return max(len(re.findall(r"[.!?]+(?=\s|$)", text.strip())), 1)
