"""Instruction following as in IFEval (Zhou et al. 2023, arXiv 2311.07911): instructions that rules can check.

An instruction has an id (`length_constraints:number_words`) and arguments (`{"num_words": 9, "relation": "at least"}`).
Rows name theirs in the columns `instruction_id_list` and `kwargs`. Rows of RLVR-IFeval, which ROLL uses, name one
function and its arguments in the ground truth; they are read as the instruction of the same meaning.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from arborl.errors import did_you_mean
from arborl.registry import load
from arborl.rewards.text.text_measures import as_turns, without_thinking
from arborl.rewards.text.text_reward import Context, RewardFunction, RewardResult, Turns
from arborl.rewards.threaded_calls import call_in_thread

Detector = Callable[[str], str | None]
"""From a text to the ISO 639-1 code of its language; None if it has none."""


@dataclass(eq=False)
class InstructionFollowingReward(RewardFunction):
    """The share of the row's instructions that the last reply follows, without its thinking.

    An instruction that is unknown, or has other arguments than its own, fails the episode.

    Example:
        rewards: [{name: ifeval, args: {mode: loose, all: true}}]
    """

    name: str = "ifeval"
    """In metrics."""
    mode: Literal["strict", "loose"] = "strict"
    """`loose` also accepts an instruction that is followed without the first line, the last line or asterisks."""
    all: bool = False
    """1 if all instructions are followed, else 0."""
    field: str = "answer"
    """Of the task, with the instructions if it has no `instruction_id_list`."""
    detector: str | Detector = "langdetect"
    """Language detector of `language:response_language` and `change_case:english_…`: the package `langdetect`, or a
    function from a text to an ISO 639-1 code, as `package.module:function`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("strict", "loose"):
            raise ValueError(f"mode={self.mode!r}: give strict or loose")
        self._detect: Detector | None = None if self.detector == "langdetect" else self._own_detector()

    def _own_detector(self) -> Detector:
        found = load(self.detector, "language detector") if isinstance(self.detector, str) else self.detector
        if not callable(found):
            raise ValueError(f"detector={self.detector!r}: give langdetect, or a function from a text to a code")
        return found  # type: ignore[no-any-return]

    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult:
        instructions = read_instructions(context or {}, self.field)
        replies = [turn.content for turn in as_turns(turns) if turn.role == "assistant"]
        reply = without_thinking(replies[-1]) if replies else ""
        followed = await call_in_thread(self._follow, reply, instructions)
        share = sum(followed) / len(followed)
        every = float(share == 1)
        return RewardResult(every if self.all else share, {"share": share, "all": every})

    def _follow(self, reply: str, instructions: Sequence[Instruction]) -> list[bool]:
        replies = variants(reply) if self.mode == "loose" else [reply]
        return [
            any(one.strip() and instruction.check(one, self.detect) for one in replies) for instruction in instructions
        ]

    def detect(self, text: str) -> str | None:
        if self._detect is None:
            self._detect = langdetect_detector()
        return self._detect(text)


def variants(reply: str) -> list[str]:
    """The reply, and without its first line, its last line and both; each also without asterisks."""
    lines = reply.split("\n")
    cut = [reply, *("\n".join(some).strip() for some in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(one.replace("*", "") for one in cut)]


def langdetect_detector() -> Detector:
    """The detector of the package `langdetect`, with a fixed seed; None for a text without letters."""
    try:
        package: Any = importlib.import_module("langdetect")
    except ImportError as error:
        raise LookupError(
            "language:response_language and change_case:english_… need a language detector: pip install langdetect, or "
            "write rewards=[{name: ifeval, args: {detector: package.module:function}}] with a function from a text to "
            "a code such as en"
        ) from error
    package.DetectorFactory.seed = 0

    def detect(text: str) -> str | None:
        with suppress(package.LangDetectException):
            return str(package.detect(text))
        return None

    return detect


# ------------------------------------------------------------------------------------------------ instructions of a row


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its arguments."""

    id: str
    args: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.id not in CHECKS:
            known = f"Known: {', '.join(CHECKS)}."
            raise LookupError(f"no instruction is called {self.id!r}.{did_you_mean(self.id, CHECKS)} {known}")
        parameters = [one for name, one in inspect.signature(CHECKS[self.id]).parameters.items() if name not in GIVEN]
        takes = ", ".join(one.name for one in parameters) or "none"
        for key in self.args:
            if key not in {one.name for one in parameters}:
                raise ValueError(f"instruction {self.id!r} has no argument {key!r}; its arguments: {takes}")
        for one in parameters:
            if one.default is one.empty and one.name not in self.args:
                raise ValueError(f"instruction {self.id!r} needs the argument {one.name!r}; its arguments: {takes}")

    def check(self, text: str, detect: Detector) -> bool:
        check = CHECKS[self.id]
        more = {"detect": detect} if "detect" in inspect.signature(check).parameters else {}
        return check(text, **self.args, **more)


def read_instructions(fields: Mapping[str, Any], field: str = "answer") -> list[Instruction]:
    """The instructions of a task, from its columns `instruction_id_list` and `kwargs`, else from `field`."""
    if fields.get("instruction_id_list") is not None:
        return _listed(fields)
    truth = _parsed(fields.get(field), field)
    if isinstance(truth, Mapping) and "instruction_id_list" in truth:
        return _listed(truth)
    if isinstance(truth, Mapping) and "func_name" in truth:
        return [_from_function(truth)]
    columns = ", ".join(str(name) for name in fields if name != "metrics") or "no columns"
    raise LookupError(
        f"needs the columns 'instruction_id_list' and 'kwargs', or {field!r} with them or with 'func_name'; the task "
        f"has: {columns}"
    )


def _listed(fields: Mapping[str, Any]) -> list[Instruction]:
    ids, kwargs = (_parsed(fields.get(name), name) for name in ("instruction_id_list", "kwargs"))
    if not isinstance(ids, list | tuple) or not ids:
        raise ValueError(f"instruction_id_list is {ids!r}; write a list with at least one id")
    kwargs = [{}] * len(ids) if kwargs is None else kwargs
    if not isinstance(kwargs, list | tuple) or len(kwargs) != len(ids):
        raise ValueError(f"kwargs is {kwargs!r}; write a list with one mapping for each of {len(ids)} instructions")
    return [Instruction(str(name), _arguments(one)) for name, one in zip(ids, kwargs, strict=True)]


def _arguments(value: Any) -> dict[str, Any]:
    """The arguments that have a value: tables store the others as null."""
    value = _parsed(value, "kwargs")
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"kwargs has {value!r}; write a mapping with the arguments of the instruction")
    return {str(key): one for key, one in (value or {}).items() if one is not None}


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {value[:100]!r}: {error}") from error


RLVR_FUNCTIONS: dict[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}, {}),
    "verify_keyword_frequency": (
        "keywords:frequency", {"word": "keyword", "N": "frequency"}, {"relation": "exactly", "whole_words": True}
    ),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency", {"letter": "letter", "N": "let_frequency"}, {"let_relation": "exactly"}
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}, {"divider": "* * *"}),
    "validate_word_constraint": (
        "length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}, {}
    ),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences", {"N": "num_sentences", "quantifier": "relation"}, {}
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "first_word": "first_word", "i": "nth_paragraph"},
        {},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}, {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}, {}),
    "validate_sections": (
        "detectable_format:multiple_sections", {"N": "num_sections", "section_splitter": "section_spliter"}, {}
    ),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {"english": False}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {"english": False}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency", {"N": "capital_frequency", "quantifier": "capital_relation"}, {}
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}  # fmt: skip
"""Function of RLVR-IFeval -> instruction, its argument by theirs, and arguments that they do not write."""


def _from_function(truth: Mapping[str, Any]) -> Instruction:
    name = str(truth["func_name"])
    if name not in RLVR_FUNCTIONS:
        near = did_you_mean(name, RLVR_FUNCTIONS)
        raise LookupError(f"func_name={name!r}: unknown.{near} Known: {', '.join(RLVR_FUNCTIONS)}.")
    instruction, names, fixed = RLVR_FUNCTIONS[name]
    given = {names[key]: value for key, value in truth.items() if key in names and value is not None}
    return Instruction(instruction, {**given, **fixed})


# ------------------------------------------------------------------------------------------------ checks

GIVEN = ("text", "detect")
"""Parameters of checks that are no arguments of the instruction."""
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda count, number: count < number,
    "at least": lambda count, number: count >= number,
    "at most": lambda count, number: count <= number,
    "exactly": lambda count, number: count == number,
    "around": lambda count, number: abs(count - number) <= max(round(number * 0.1), 1),
}
"""IFEval has the first two, RLVR-IFeval all but the first."""
RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|inc|ltd|co|no|fig|approx|e\.g|i\.e|cf|al|gen|capt|lt|[a-z]|\d+)\.$",
    re.IGNORECASE,
)
"""A text that ends with one of these has not ended its sentence."""
SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s)|[。！？]+")
CAPITAL_TOKEN = re.compile(r"\w+(?:[-/.'’]\w+)*")
FENCE = re.compile(r"\A```(?:json)?", re.IGNORECASE)


def compared(count: int, number: Any, relation: Any) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"relation is {relation!r}; write one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, whole_number(number))


def whole_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError(f"{value!r} is given as a count; write a whole number")
    return int(value)


def texts(value: Any, name: str) -> list[str]:
    """A list of texts that are not empty."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"{name} is {value!r}; write a list of words")
    return list(value)


def one_text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}; write a text")
    return value.strip()


def count_ended_sentences(text: str) -> int:
    """Sentences by a rule: a mark followed by white space ends one, unless it belongs to an abbreviation, an initial or
    a number in a list, or is an ellipsis before a small letter."""
    count, start = 0, 0
    text = text.strip()
    for end in SENTENCE_END.finditer(text):
        before, after = text[max(start, end.start() - 12) : end.start() + 1], text[end.end() : end.end() + 20].lstrip()
        if end[0] == "." and ABBREVIATION.search(before):
            continue
        if end[0].startswith(("..", "…")) and after[:1].islower():
            continue
        count, start = count + 1, end.end()
    return count + bool(text[start:].strip())


def _existence(text: str, keywords: Any) -> bool:
    return all(one.casefold() in text.casefold() for one in texts(keywords, "keywords"))


def _forbidden_words(text: str, forbidden_words: Any) -> bool:
    return not any(_occurrences(one, text, whole=True) for one in texts(forbidden_words, "forbidden_words"))


def _occurrences(word: str, text: str, whole: bool) -> int:
    pattern = rf"(?<!\w){re.escape(word)}(?!\w)" if whole else re.escape(word)
    return len(re.findall(pattern, text, re.IGNORECASE))


def _frequency(text: str, keyword: Any, frequency: Any, relation: Any, whole_words: bool = False) -> bool:
    return compared(_occurrences(one_text(keyword, "keyword"), text, whole_words), frequency, relation)


def _letter_frequency(text: str, letter: Any, let_frequency: Any, let_relation: Any) -> bool:
    letter = one_text(letter, "letter").lower()
    if len(letter) != 1:
        raise ValueError(f"letter is {letter!r}; write one letter")
    return compared(text.lower().count(letter), let_frequency, let_relation)


def _response_language(text: str, language: Any, detect: Detector) -> bool:
    return detect(text) in (None, one_text(language, "language"))


def _number_sentences(text: str, num_sentences: Any, relation: Any) -> bool:
    return compared(count_ended_sentences(text), num_sentences, relation)


def _number_words(text: str, num_words: Any, relation: Any) -> bool:
    return compared(len(re.findall(r"\w+", text)), num_words, relation)


def _number_paragraphs(text: str, num_paragraphs: Any, divider: str = "***") -> bool:
    return _parts(text, divider) == whole_number(num_paragraphs)


def _parts(text: str, divider: str) -> int | None:
    """The number of parts between dividers; None if one in the middle is empty."""
    parts = [part.strip() for part in text.split(divider)]
    return None if "" in parts[1:-1] else sum(bool(part) for part in parts)


def _nth_paragraph_first_word(text: str, num_paragraphs: Any, nth_paragraph: Any, first_word: Any) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n")]
    number, nth = sum(bool(part) for part in paragraphs), whole_number(nth_paragraph)
    if number != whole_number(num_paragraphs) or not 1 <= nth <= number or not paragraphs[nth - 1]:
        return False
    first = paragraphs[nth - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", first)[0].lower() == one_text(first_word, "first_word").lower()


def _number_placeholders(text: str, num_placeholders: Any) -> bool:
    closed = (piece for line in text.split("\n") for piece in line.split("]")[:-1])
    return sum("[" in piece for piece in closed) >= whole_number(num_placeholders)


def _postscript(text: str, postscript_marker: Any) -> bool:
    marker = one_text(postscript_marker, "postscript_marker")
    return re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def _number_bullet_lists(text: str, num_bullets: Any) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    bullets = [line for line in lines if line[:1] == "-" or (line[:1] == "*" and line[1:2] not in ("", "*"))]
    return len(bullets) == whole_number(num_bullets)


def _constrained_response(text: str, options: Any = RESPONSES) -> bool:
    options = [one.strip() for one in options.split(",")] if isinstance(options, str) else options
    return any(one in text for one in texts(options, "options"))


def _number_highlighted_sections(text: str, num_highlights: Any) -> bool:
    found = re.findall(r"\*\*[^\n*]*\*\*", text) + re.findall(r"\*[^\n*]*\*", text)
    return sum(bool(one.strip("*").strip()) for one in found) >= whole_number(num_highlights)


def _multiple_sections(text: str, num_sections: Any, section_spliter: Any) -> bool:
    marks = re.findall(rf"{re.escape(one_text(section_spliter, 'section_spliter'))}\s?\d+", text)
    return len(marks) >= whole_number(num_sections)


def _json_format(text: str) -> bool:
    try:
        json.loads(FENCE.sub("", text.strip()).removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    responses = [part.strip() for part in text.split("******")]
    return _parts(text, "******") == 2 and len({part for part in responses if part}) == 2


def _repeat_prompt(text: str, prompt_to_repeat: Any) -> bool:
    return text.strip().lower().startswith(one_text(prompt_to_repeat, "prompt_to_repeat").lower())


def _end_checker(text: str, end_phrase: Any) -> bool:
    return text.strip().strip('"').lower().endswith(one_text(end_phrase, "end_phrase").lower())


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_word_frequency(text: str, capital_frequency: Any, capital_relation: Any) -> bool:
    count = sum(word.isupper() for word in CAPITAL_TOKEN.findall(text))
    return compared(count, capital_frequency, capital_relation)


def _english_capital(text: str, detect: Detector, english: bool = True) -> bool:
    return text.isupper() and (not english or detect(text) in (None, "en"))


def _english_lowercase(text: str, detect: Detector, english: bool = True) -> bool:
    return text.islower() and (not english or detect(text) in (None, "en"))


def _no_comma(text: str) -> bool:
    return "," not in text


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}
"""Instruction -> its check. The parameters after the text are the arguments in `kwargs`."""
