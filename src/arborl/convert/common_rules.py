"""Rules as data: what becomes of one key. Reasons and parts that several systems share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import RunConfig
from arborl.convert.draft import Draft, one_or_all

Rule = Callable[[Draft, str, Any], None]
"""Conversion of one key: (draft, key, value)."""
Condition = Callable[[Draft], Any]
VISION_MODEL = re.compile(r"(?:[-_.]|^)(?:VL|Omni|LLaVA)\b|InternVL|MiniCPM-[VoO]|-\d(?:\.\d)?V\b", re.IGNORECASE)
"""Names of models that are trained on images."""
NO_PICTURES = "models that see are not trained here. Give rows of text, and a model of text."
UNSEEN = re.compile(r"\$\([^()]*\)|`[^`]*`|\$\{?\w+\}?")
"""Parts of a value that are only known when a script runs."""

ENGINE = "sampling is done by Arbor's own engine, which shares the learner's weights"
MICRO = "micro-batches are counted in tokens, and change nothing but memory: learner.micro_batch_tokens"
REFERENCE = "the reference policy is a frozen copy, made when algorithm.kl.coef > 0"
SEARCH_TAGS = {
    "code_start_tag": "<search>", "code_end_tag": "</search>",
    "result_start_tag": "<information>", "result_end_tag": "</information>",
}  # fmt: skip
"""Search-R1's agent, which writes queries between tags, is the code agent with a search tool."""
CORPUS: dict[str, dict[str, Any]] = {
    "search": {"corpus": "corpus.jsonl"},
    "retrieve": {"corpus": "corpus.jsonl", "embed": "intfloat/e5-base-v2"},
}
"""Arguments of tools that call a service there."""
DOCUMENTS = "a service there; here a file with one document per line"
LEFT_OUT = "none"
"""`--use NAME=none` leaves a tool or reward out."""


def to(path: str, change: Callable[[Any], Any] | Mapping[Any, Any] | None = None, why: str = "") -> Rule:
    """Our `path`, with the value converted by a function or a table."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if not isinstance(change, Mapping):
            draft.set(key, value, path, change(value) if change else value, why)
        elif value in change:
            draft.set(key, value, path, change[value], why)
        else:
            draft.lose(key, value, f"no counterpart of {value!r} for {path}. Known: {', '.join(map(str, change))}")

    return rule


def num(path: str, change: Callable[[Any], Any] | None = None, why: str = "") -> Rule:
    """A number. One that is only known when the script runs is refused."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None:
            draft.skip(key, value, "null: their default")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            draft.refuse(key, value, "not a number that can be read without running the script. Write it there.")
        else:
            draft.set(key, value, path, change(value) if change else value, why)

    return rule


def text(path: str, why: str = "", variable: str = "") -> Rule:
    """A path or a name; several files are a list. With `variable`, an empty one is that variable of the environment."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value in (None, [], "") and variable:
            draft.set(key, value, path, f"${{oc.env:{variable}}}", f"empty there: set {variable}, or write it")
            return
        if value in (None, [], ""):
            draft.skip(key, value, "null: not given")
            return
        parts = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        unseen = UNSEEN.search(" ".join(parts))
        reason = f"{unseen[0]} is only known when the script runs: write it yourself" if unseen else why
        draft.set(key, value, path, one_or_all(parts), reason)

    return rule


def folder(path: str, why: str) -> Rule:
    """A folder; one that is only known when the script runs is skipped, with `why`."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None or UNSEEN.search(str(value)):
            draft.skip(key, value, f"only known when the script runs; {why}")
        else:
            draft.set(key, value, path, str(value))

    return rule


def choice(path: str, table: Mapping[str, Any], remedy: str) -> Rule:
    """One of several; another is refused."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if str(value) not in table:
            draft.refuse(key, value, f"there is no {value!r} here. {remedy}")
        else:
            draft.set(key, value, path, table[str(value)])

    return rule


def positive(path: str, why: str = "off: the default, or at the end only") -> Rule:
    """A whole number above 0; others are skipped."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if isinstance(value, int) and value > 0:
            draft.set(key, value, path, value)
        else:
            draft.skip(key, value, why)

    return rule


def no(why: str) -> Rule:
    """No counterpart."""
    return lambda draft, key, value: draft.lose(key, value, why)


def idle(why: str) -> Rule:
    """No counterpart needed."""
    return lambda draft, key, value: draft.skip(key, value, why)


def unless(usual: Any, why: str) -> Rule:
    """No counterpart needed at the usual value (a tuple: values); no counterpart at another."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None or (value in usual if isinstance(usual, tuple) else value == usual):
            draft.skip(key, value, "as it is here anyway")
        else:
            draft.lose(key, value, why)

    return rule


def refuse(why: str, off: str = "") -> Rule:
    """The conversion fails; with `off`, only if the value is set."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if off and not value:
            draft.skip(key, value, off)
        else:
            draft.refuse(key, value, why)

    return rule


def when(condition: Condition, rule: Rule, why: str) -> Rule:
    """`rule` where the condition holds; elsewhere their system does not read the key."""

    def checked(draft: Draft, key: str, value: Any) -> None:
        if condition(draft):
            rule(draft, key, value)
        else:
            draft.skip(key, value, why)

    return checked


def known(key: str, *values: Any) -> Condition:
    """Whether their value of `key` is one of these; without values, whether it is set and not zero."""
    return lambda draft: draft.known(key) in values if values else draft.known(key)


def together(draft: Draft, key: str, value: Any) -> None:
    """For keys that are read with others."""


def write_defaults(draft: Draft, table: Mapping[str, Rule]) -> None:
    """Let each of their defaults go through the rule of its key, and write those that differ from Arbor's."""
    assumed = Draft(source=draft.source, settings=dict(draft.settings), defaults=draft.defaults)
    for key, value in draft.defaults.items():
        if key not in draft.source:
            table[key](assumed, key, value)
    draft.problems += assumed.problems
    usual = _usual_here(draft.settings | assumed.settings)
    for line in assumed.lines:
        if line.path and (line.path not in usual or usual[line.path] != line.ours):
            draft.default(line.key, line.value, line.path, line.ours, line.why)


def _usual_here(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arbor's defaults with the advantage and the loss of these settings, by dotted key."""
    preset = AlgorithmConfig(name=settings.get("algorithm.name", "grpo"))
    chosen = AlgorithmConfig(name=preset.name, loss=settings.get("algorithm.loss", preset.loss))
    own = dict(_dotted(chosen.model_dump(mode="json"), "algorithm."))
    usual = dict(_dotted(RunConfig().model_dump(mode="json"))) | own
    return usual | {"algorithm.name": "grpo", "algorithm.loss": preset.loss}


def _dotted(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
