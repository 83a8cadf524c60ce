"""Equality of answers: numbers as numbers, however they are written, and everything else as text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arborl.rewards.fields import field_of
from arborl.rewards.tags import last_tagged
from arborl.types import Episode

MAX_DIGITS, MAX_EXPONENT = 400, 400
SPACED = r"\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)"
PLAIN = rf"(?:{SPACED}|\d[\d,_]*\d|\d)(?:\.\d+)?|\.\d+"
SIGN = r"(?:(?<![\w)\].])[-+])?"
NUMBER = re.compile(
    rf"""(?P<sign>{SIGN})(?:[$€£]\s?(?P<inner>[-+]?))?
    (?:(?P<whole>\d+)\s?)?\\[dt]?frac\{{(?P<top>[-+]?[\d.,]+)\}}\{{(?P<bottom>[\d.,]+)\}}
    |(?P<sign2>{SIGN})(?:[$€£]\s?(?P<inner2>[-+]?))?
    (?:(?P<whole2>\d+)[ ](?=\d+/\d))?(?P<number>{PLAIN})
    (?:[eE](?P<exponent>[-+]?\d+)(?![\w.])|\s?(?:\\times|\\cdot|[×*x])\s?10\^\{{?(?P<power>[-+]?\d+)\}}?)?
    (?:\s?/\s?(?P<over>\d[\d,]*(?:\.\d+)?))?""",
    re.VERBOSE,
)
PERCENT = re.compile(r"\s?(?:%|percent\b|per\s?cent\b)", re.IGNORECASE)
GROUPED = re.compile(r"\d{1,3}([,_ \u00a0\u2009\u202f])\d{3}(?:\1\d{3})*")
LATEX = (("\\!", ""), ("\\,", ""), ("\\%", "%"), ("\\$", "$"), ("{,}", ","), ("−", "-"), ("－", "-"), ("$$", ""))
PHRASE = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)+\s*([^\n]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written."""

    value: Fraction
    percent: bool = False
    """A `%` stands behind it; `value` is the number before the sign."""


class Equal:
    """1 where the final answer equals the task's, else 0.

    Where the task's answer is a number, the last number of the final answer is compared with it, exactly: `-1,234.50`,
    `\\boxed{3/4}`, `\\frac{3}{4}`, `75%` and `1.5e3` are read as what they are. Elsewhere the texts are compared,
    without regard to case, white space and a full stop. `50%` equals both `50` and `0.5`.

    Example:
        rewards: [{name: equal, args: {tolerance: 0.001}}]

    Args:
        tolerance: how far a number may be off, as a share of the right one (of 1 for numbers below 1).
        field: the task's field that holds the answer; a list holds several right ones.
    """

    name = "equal"

    def __init__(self, tolerance: float = 0.0, field: str = "answer"):
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance={tolerance}: give 0 or more, below 1")
        self.tolerance, self.field = Fraction(tolerance), field

    async def __call__(self, episode: Episode) -> float:
        wanted = field_of(episode, self.field, f"reward {self.name!r}")
        options: Sequence[Any] = wanted if isinstance(wanted, list | tuple) else [wanted]
        said = final_part(episode.answer)
        return float(any(equal(said, final_part(str(one)), self.tolerance) for one in options))


def equal(said: str, wanted: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Whether an answer is the wanted one, by number where that is one, else by text."""
    right = read_number(wanted)
    if right is None:
        return plain_text(said) == plain_text(wanted)
    given = last_number(said)
    return given is not None and same_number(given, right, tolerance)


def same_number(a: Number, b: Number, tolerance: Fraction = Fraction(0)) -> bool:
    """Equal as written; a percentage beside a plain number may be meant as its hundredth."""
    pairs = [(a.value, b.value)]
    if a.percent != b.percent:
        pairs.append((a.value / 100, b.value) if a.percent else (a.value, b.value / 100))
    return any(abs(x - y) <= tolerance * max(abs(y), Fraction(1)) for x, y in pairs)


def read_number(text: str) -> Number | None:
    """The number that the whole text is; None where it is not one.

    Example:
        read_number("-1,234.50")      # Number(Fraction(-2469, 2))
        read_number("1,00")           # None: no thousands are written so
    """
    text = clean(text).strip().rstrip(" .$€£")
    found = NUMBER.match(text)
    return _value(found, text) if found and not PERCENT.sub("", text[found.end() :], count=1).strip() else None


def last_number(text: str) -> Number | None:
    """The last number in a text; None where there is none, or where it is not written as one."""
    text = clean(text)
    found = deque(NUMBER.finditer(text), maxlen=1)
    return _value(found[0], text) if found else None


def final_part(text: str) -> str:
    """Where the answer is: the last `<answer>` or `\\boxed{}`, what follows `####` or `answer is`, or the last line."""
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


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}`, braces inside it included; None where none is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for at in range(begin - 1, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[begin:at]
    return None


def plain_text(text: str) -> str:
    """A text with what does not matter taken off."""
    text = re.sub(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    return " ".join(text.split()).strip(" .\"'`$").casefold()


def clean(text: str) -> str:
    for written, meant in LATEX:
        text = text.replace(written, meant)
    return text


def _value(found: re.Match[str], text: str) -> Number | None:
    part = found.groupdict()
    negative = "-" in (part["sign"] or "", part["inner"] or "", part["sign2"] or "", part["inner2"] or "")
    if part["top"] is not None:
        top, bottom, whole = _plain(part["top"].lstrip("+-")), _plain(part["bottom"]), part["whole"]
        negative ^= part["top"].startswith("-")
    else:
        top, whole = _plain(part["number"]), part["whole2"]
        bottom = _plain(part["over"]) if part["over"] else Fraction(1)
        exponent = int((part["exponent"] or part["power"] or "0")[:8])
        if abs(exponent) > MAX_EXPONENT:
            return None
        top = top * Fraction(10) ** exponent if top is not None else None
    if top is None or not bottom or (whole is not None and len(whole) > MAX_DIGITS):
        return None
    value = top / bottom + (int(whole) if whole else 0)
    return Number(-value if negative else value, PERCENT.match(text, found.end()) is not None)


def _plain(digits: str) -> Fraction | None:
    """Digits with or without separators of thousands, which must then be where they belong."""
    whole, point, rest = digits.partition(".")
    if whole and not whole.isdecimal():
        if not GROUPED.fullmatch(whole):
            return None
        whole = re.sub(r"\D", "", whole)
    if len(whole) + len(rest) > MAX_DIGITS or not (whole or rest) or (rest and not rest.isdecimal()):
        return None
    return Fraction(f"{whole or 0}{point if rest else ''}{rest}")
