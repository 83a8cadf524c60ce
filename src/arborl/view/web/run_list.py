"""The list of runs: its rows, the text filter over names, tags and settings, and the settings to group by.

A filter is a list of words that must all hold. `learner.lr=1e-5` is about a setting, by its key or the end of its key;
`tag=`, `state=`, `run=` and `note=` are about the run itself; other words are searched in name, tags, note, state,
model, algorithm and environment. Operators are `=`, `!=`, `<`, `<=`, `>` and `>=`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.view.web import folders
from arborl.view.web.tags import read_tags

MAX_FILTER = 400
"""Characters of a filter."""
MAX_VARYING = 400
"""Settings that are offered for grouping."""
WORD = re.compile(r'(?:"[^"]*"?|[^\s"])+')
CONDITION = re.compile(r"([A-Za-z_][\w.\-/]*)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
TEXTS = ("run", "title", "state", "model", "algorithm", "environment", "note")
"""Fields of a row that are searched for words."""
GROUPS = ("algorithm", "model", "environment", "state", "stub", "tag")
"""Fields of a row to group by, besides settings."""


def run_row(name: str, folder: Path) -> dict[str, Any]:
    """A run in the list."""
    made, tags_problem = read_tags(folder)
    state, progress = folders.run_state(folder), folders.progress(folder)
    ends = progress["ends"]
    problems = [one for one in (*state["problems"], progress["problem"], tags_problem) if one]
    seconds = progress["train_seconds"] if state["seconds"] is None else state["seconds"]
    return {
        "run": name, **state, "step": progress["step"], "seconds": seconds,
        "reward": ends.get("reward/mean"), "success": ends.get("episode/success"), "loss": ends.get("policy/loss"),
        "tags": list(made.tags), "note": made.note, "problems": problems,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """One word of a filter: of a setting or field `key`, or, without a key, of any text."""

    key: str
    sign: str
    value: str

    def holds(self, row: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        if not self.key:
            texts = (row.get(name) for name in TEXTS)
            words = [str(text) for text in (*texts, *row["tags"]) if text] + (["stub"] if row["stub"] else [])
            return any(self.value.casefold() in word.casefold() for word in words)
        values = list(_values(self.key, row, settings))
        if self.sign == "=":
            return any(_equals(one, self.value) for one in values)
        if self.sign == "!=":
            return not any(_equals(one, self.value) for one in values)
        wanted = _number(self.value)
        compare = COMPARISONS[self.sign]
        numbers = (number for one in values if (number := _number(one)) is not None)
        return wanted is not None and any(compare(number, wanted) for number in numbers)


def parse_filter(text: str) -> list[Condition]:
    """The conditions of a filter.

    >>> parse_filter('lake learner.lr>=1e-5 tag="long run"')[1:]
    [Condition(key='learner.lr', sign='>=', value='1e-5'), Condition(key='tag', sign='=', value='long run')]
    """
    if len(text) > MAX_FILTER:
        raise ConfigError(f"a filter has at most {MAX_FILTER} characters")
    found = []
    for word in WORD.findall(text):
        match = CONDITION.fullmatch(word)
        key, sign, value = match.groups() if match else ("", "", word)
        found.append(Condition(key, sign, value.replace('"', "")))
    return found


def matches(conditions: Iterable[Condition], row: Mapping[str, Any], folder: Path) -> bool:
    """Whether all conditions hold for a run."""
    return all(one.holds(row, folders.flat_config(folder) if one.key else {}) for one in conditions)


def setting_of(key: str, row: Mapping[str, Any], folder: Path) -> str:
    """The value to group a run by, as text."""
    if key == "tag":
        return ", ".join(row["tags"])
    return _text(row.get(key) if key in GROUPS else folders.flat_config(folder).get(key))


def varying_settings(runs: Iterable[Path]) -> list[str]:
    """Keys of settings that differ between runs, or that only some of them have."""
    values: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    num_runs = 0
    for settings in filter(None, map(folders.flat_config, runs)):
        num_runs += 1
        counts.update(settings.keys())
        for key, value in settings.items():
            values.setdefault(key, set()).add(_text(value))
    found = (key for key, texts in values.items() if len(texts) > 1 or counts[key] < num_runs)
    return sorted(key for key in found if key not in folders.IGNORED_KEYS)[:MAX_VARYING]


def _values(key: str, row: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Any]:
    if key in ("tag", "tags"):
        return list(row["tags"])
    if key in ("run", "state", "note", "step", "stub"):
        return [row[key]]
    exact = [settings[name] for name in (key, f"{key}.name") if name in settings]
    return exact or [value for name, value in settings.items() if name.endswith(f".{key}")]


def _equals(value: Any, wanted: str) -> bool:
    number, other = _number(value), _number(wanted)
    if number is not None and other is not None:
        return math.isclose(number, other, rel_tol=1e-9)
    if isinstance(value, list) and any(_equals(one, wanted) for one in value):
        return True
    return _text(value).casefold() == wanted.casefold()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return value[: folders.MAX_TEXT] if isinstance(value, str) else json.dumps(value, default=str)[: folders.MAX_TEXT]
