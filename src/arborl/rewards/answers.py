"""Rewards of the final answer: as a number, as text, as a letter, by its format; and the environment's own reward."""

from __future__ import annotations

import re
import string
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

from arborl.rewards import REWARDS, find_reward
from arborl.rewards.reward import Reward, as_finite_numbers, reward
from arborl.rewards.threaded_calls import call
from arborl.types import Episode, StopReason

# ------------------------------------------------------------------------------------------------ finding the answer

ALIASES = "golden_answers"
"""Column with several right answers, as in FlashRAG's and AgentFly's rows."""
PHRASE = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)+\s*([^\n]+)", re.IGNORECASE)


def field_of(episode: Episode, name: str, who: str) -> Any:
    """A field of the task; LookupError with the known fields if it is missing."""
    fields = episode.task.fields
    if name not in fields:
        raise LookupError(
            f"{who} needs the field {name!r}; task {episode.task.id!r} has: {', '.join(fields) or 'none'}"
        )
    return fields[name]


def gold_of(episode: Episode, field: str, who: str) -> Any:
    """The right answer of a task, or a list of them: `field`, else `golden_answers` if `field` is the default
    `answer`. Of verl's `{"target": …}` the target."""
    has_other = field == "answer" and field not in episode.task.fields and ALIASES in episode.task.fields
    gold = field_of(episode, ALIASES if has_other else field, who)
    gold = gold.get("target") if isinstance(gold, Mapping) and "target" in gold else gold
    if gold is None or (isinstance(gold, list | tuple) and not gold):
        raise LookupError(f"{who}: the field {field!r} of task {episode.task.id!r} is {gold!r}; give an answer")
    return gold


def gold_answers(episode: Episode, field: str, who: str) -> list[str]:
    """The right answers of a task as texts; a single one is a list of one."""
    gold = gold_of(episode, field, who)
    return [str(one) for one in gold] if isinstance(gold, list | tuple) else [str(gold)]


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


UNANSWERED = ("tool/malformed", "tool/unknown_tool")
"""Failures of calls that reached no tool."""


@dataclass(eq=False, kw_only=True)
class RequiredBehavior:
    """Base class: an episode without the required tool calls or messages has the value `unmet`, right or wrong.

    A value for a tool call alone is easily earned without a right answer: compare with a run without it.
    """

    min_tool_calls: int = 0
    """Tool calls that the episode needs. Malformed calls and calls of unknown tools do not count."""
    last_pattern: str | None = None
    earlier_pattern: str | None = None
    """`last_pattern`, `earlier_pattern`: Regular expressions that must be found in the last message of the agent, and
    in each earlier one; a dot matches any character."""
    unmet: float = 0.0
    """Value without them."""

    def __post_init__(self) -> None:
        if self.min_tool_calls < 0:
            raise ValueError(f"min_tool_calls={self.min_tool_calls}: give 0 or more")
        self._patterns = [
            None if pattern is None else compile_pattern(key, pattern)
            for key, pattern in (("earlier_pattern", self.earlier_pattern), ("last_pattern", self.last_pattern))
        ]

    def is_met(self, episode: Episode) -> bool:
        metrics = episode.metrics
        calls = metrics.get("tool/calls", 0.0) - sum(metrics.get(name, 0.0) for name in UNANSWERED)
        if calls < self.min_tool_calls:
            return False
        replies = [call.reply for call in episode.calls if call.reply is not None]
        texts = [message.content for message in replies or (turn.message for turn in episode.turns)]
        earlier, last = self._patterns
        return (last is None or any(map(last.search, texts[-1:]))) and (
            earlier is None or all(map(earlier.search, texts[:-1]))
        )


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{key}={pattern!r} is not a regular expression: {error}") from error


@dataclass(eq=False)
class Equal(RequiredBehavior):
    """`right` if the final answer equals the task's answer, else `wrong`.

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
    right: float = 1.0
    wrong: float = 0.0
    """`right`, `wrong`: The two values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance}: give 0 or more, below 1")

    @property
    def required_fields(self) -> tuple[str, ...]:
        return (self.field,)

    async def __call__(self, episode: Episode) -> float:
        expected = field_of(episode, self.field, f"reward {self.name!r}")
        if not self.is_met(episode):
            return self.unmet
        options: Sequence[Any] = expected if isinstance(expected, list | tuple) else [expected]
        answer = final_part(episode.answer)
        is_right = any(equal(answer, final_part(str(one)), Fraction(self.tolerance)) for one in options)
        return self.right if is_right else self.wrong


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
        self._pattern = None if self.pattern is None else compile_pattern("pattern", self.pattern)

    async def __call__(self, episode: Episode) -> float:
        has_failed = self.tools and any(episode.metrics.get(name, 0.0) > 0 for name in FORMAT_FAILURES)
        return self.good if not has_failed and self._matches(episode.answer.strip()) else self.bad

    def _matches(self, text: str) -> bool:
        if self._pattern is not None:
            return self._pattern.fullmatch(text) is not None
        inside = text.partition("<answer>")[2].partition("</answer>")[0]
        return text.count("<answer>") == text.count("</answer>") == 1 and bool(inside.strip())


@dataclass(eq=False)
class Repetition:
    """Minus the share of word sequences of the last message that occur in it before: 0 without repetition, above -1.

    Give it a weight beside a reward for correctness. Letter case is ignored; a message with fewer words scores 0. The
    penalty for repeated n-grams of Yeo et al. 2025 (arXiv 2502.03373).

    Example:
        rewards: [equal, {name: repetition, weight: 0.5}]
    """

    name = "repetition"

    words: int = 3
    """Words of a sequence."""

    def __post_init__(self) -> None:
        if isinstance(self.words, bool) or not isinstance(self.words, int) or self.words < 1:
            raise ValueError(f"words={self.words!r}: give a whole number above 0")

    async def __call__(self, episode: Episode) -> float:
        words = episode.answer.lower().split()
        sequences = list(zip(*(words[start:] for start in range(self.words)), strict=False))
        return len(set(sequences)) / len(sequences) - 1 if sequences else 0.0


# --------------------------------------------------------------------------------------------- choices, short answers

LETTER = re.compile(r"\s*\(?([A-Za-z])(?:[).:]|\s*$)")
GOLD_LETTER = re.compile(r"\(?([A-Za-z])[).:]?")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
VERDICTS = (["yes"], ["no"], ["noanswer"])
"""Answers that have no partly right form."""


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


@dataclass(eq=False)
class MultipleChoice(PenalizedReward):
    """Multiple choice: `right`, `wrong`, or `invalid` if the answer begins with no letter (`B`, `(B)`, `B. Oslo`).

    With `open`, rows whose right answer is not a letter are scored by that reward. It has the same `right`, `wrong`,
    `invalid`, `exceeded`, `too_few_turns` and `field`, unless its arguments have others.

    Example:
        rewards: [{name: choice, args: {open: {name: judge, args: {model: my-judge, fallback: exact}}}}]
    """

    open: str | Mapping[str, Any] | None = None
    """Reward of the other rows: `{name: …, args: {…}}`, or its name. By default such a row is an error."""
    letters: str = string.ascii_uppercase
    """Letters that are a choice as right answer: `ABCD`."""
    no_letter: float | None = None
    """Value if the answer begins with no letter; `invalid` by default."""

    def __post_init__(self) -> None:
        self.letters = self.letters.upper()
        self._open = None if self.open is None else self._open_reward(self.open)

    def _open_reward(self, given: str | Mapping[str, Any]) -> Reward:
        spec: Any = {"name": given} if isinstance(given, str) else given
        if not isinstance(spec, Mapping) or "name" not in spec or spec.keys() - {"name", "args"}:
            raise ValueError(f"open={given!r}: write {{name: judge, args: {{…}}}}")
        name, args = str(spec["name"]), dict(spec.get("args") or {})
        if isinstance(REWARDS[name], type) and issubclass(REWARDS[name], PenalizedReward):
            args = {one.name: getattr(self, one.name) for one in fields(PenalizedReward)} | args
        return find_reward(name, args, "open.args")

    async def judge(self, episode: Episode) -> float:
        is_right = environment_verdict(episode, self.field)
        gold = None if is_right is not None else self._gold_letter(episode)
        if gold is None and is_right is None and self._open is not None:
            return sum(as_finite_numbers("open", await call(self._open, episode)).values())
        letter = read_letter(final_part(episode.answer))
        if letter is None:
            return self.invalid if self.no_letter is None else self.no_letter
        return self.right if is_right or letter == gold else self.wrong

    def _gold_letter(self, episode: Episode) -> str | None:
        """The letter that is right; None if the right answer is not a letter and `open` scores it."""
        gold = gold_of(episode, self.field, "reward 'choice'")
        match = GOLD_LETTER.fullmatch(str(gold).strip())
        letter = match[1].upper() if match else None
        if letter is not None and letter in self.letters:
            return letter
        if self._open is None:
            raise ValueError(
                f"the right answer {gold!r} of task {episode.task.id!r} is not one of the letters {self.letters}. "
                "Write open: {name: judge, args: {…}} for open answers, or field: COLUMN."
            )
        return None


@dataclass(eq=False)
class ShortAnswer(RequiredBehavior, PenalizedReward):
    """An answer of a few words, compared exactly or by common words (F1) with each of the right answers, as SQuAD and
    Natural Questions are evaluated: without case, ASCII punctuation, articles and repeated white space.

    The right answers are a text or a list in `field`, a list in `golden_answers`, or verl's
    `reward_model.ground_truth.target`.

    Example:
        rewards: [{name: short_answer, args: {wrong: 0, invalid: 0, exceeded: 0, max_sentences: null}}]
    """

    match: Literal["exact", "f1"] = "exact"
    """`exact`, or `f1` for values between `wrong` and `right`; `yes` and `no` are compared exactly, as in HotpotQA."""
    max_sentences: int | None = 3
    """Longer answers are invalid; None for no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.match not in ("exact", "f1"):
            raise ValueError(f"match={self.match!r}: give exact or f1")

    async def __call__(self, episode: Episode) -> float | dict[str, float]:
        return await super().__call__(episode) if self.is_met(episode) else self.unmet

    async def judge(self, episode: Episode) -> float:
        answer = final_part(episode.answer)
        if is_too_long(answer, self.max_sentences):
            return self.invalid
        is_right = environment_verdict(episode, self.field)
        if is_right is not None:
            return self.right if is_right else self.wrong
        golds = gold_answers(episode, self.field, "reward 'short_answer'")
        score = max((f1 if self.match == "f1" else exact_match)(answer, one) for one in golds)
        return self.wrong + (self.right - self.wrong) * score


def environment_verdict(episode: Episode, field: str) -> bool | None:
    """Whether the environment, which made the task, reports success; None if the task has a right answer."""
    if {field, ALIASES} & episode.task.fields.keys() or "success" not in episode.metrics:
        return None
    return episode.metrics["success"] > 0


def read_letter(text: str) -> str | None:
    """The letter at the beginning of an answer; None if it begins with a word."""
    match = LETTER.match(text)
    return match.group(1).upper() if match else None


def normalized_words(text: str) -> list[str]:
    """The words without case, punctuation and articles: `U.S.` is `us`."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def exact_match(answer: str, gold: str) -> float:
    return float(normalized_words(answer) == normalized_words(gold))


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words."""
    answer_words, gold_words = normalized_words(answer), normalized_words(gold)
    if not answer_words or not gold_words or answer_words in VERDICTS or gold_words in VERDICTS:
        return float(answer_words == gold_words)
    shared = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * shared / (len(answer_words) + len(gold_words))


def is_too_long(answer: str, max_sentences: int | None) -> bool:
    """Whether an answer is empty or has more sentences than allowed."""
    return not answer.strip() or (max_sentences is not None and count_sentences(answer) > max_sentences)


def count_sentences(text: str) -> int:
    return max(len(re.findall(r"[.!?]+(?=\s|$)", text.strip())), 1)
