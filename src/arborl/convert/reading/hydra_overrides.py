"""Hydra's overrides: `a.b=1`, `+a.b=[x, y]`, `++a.b={c: 2}`, `~a.b`."""

from __future__ import annotations

import re
import shlex
from typing import Any

from arborl.errors import ConfigError

OVERRIDE = re.compile(r"([+~]{0,2})([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
REMOVAL = re.compile(r"~([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)")
NUMBER = re.compile(r"[-+]?(?:\d[\d_]*)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
CLOSES = {"[": "]", "{": "}"}
DEEPEST = 50


def overrides(text: str, where: str) -> dict[str, Any]:
    """A list of overrides, one or more a line; keys may have no dot."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{where}: line {number}: cannot read {line[:60]!r}: {error}") from error
        for word in words:
            if (match := OVERRIDE.fullmatch(word)) and "~" not in match[1]:
                found[match[2]] = plain(match[3])
    return found


def plain(text: str) -> Any:
    """A value as Hydra reads it."""
    text = text.strip()
    try:
        value, at = _value(text, 0, "", 0)
    except ValueError:
        return text
    return value if at == len(text) else text


def _value(text: str, at: int, ends: str, depth: int) -> tuple[Any, int]:
    """A value, up to the end or one of `ends`, and where it stops; ValueError where there is none."""
    at = _blanks(text, at)
    sign = text[at : at + 1]
    if depth > DEEPEST:
        raise ValueError("too deep")
    if sign in ("'", '"'):
        return _quoted(text, at)
    if sign in CLOSES:
        return _several(text, at, depth)
    stop = at
    while stop < len(text) and text[stop] not in ends:
        if text.startswith("${", stop):
            stop = max(text.find("}", stop), stop)
        stop += 1
    return primitive(text[at:stop].strip()), stop


def _quoted(text: str, at: int) -> tuple[str, int]:
    found = re.compile(r"""(['"])((?:\\.|(?!\1).)*)\1""", re.DOTALL).match(text, at)
    if found is None:
        raise ValueError("not closed")
    return re.sub(r"\\(['\"\\])", r"\1", found[2]), found.end()


def _several(text: str, at: int, depth: int) -> tuple[Any, int]:
    closes, named = CLOSES[text[at]], text[at] == "{"
    items: list[Any] = []
    table: dict[str, Any] = {}
    at = _blanks(text, at + 1)
    while text[at : at + 1] != closes:
        if named:
            key, at = _value(text, at, ":", depth + 1)
            if text[at : at + 1] != ":":
                raise ValueError("no colon")
            table[str(key)], at = _value(text, at + 1, ",}", depth + 1)
        else:
            item, at = _value(text, at, ",]", depth + 1)
            items.append(item)
        at = _blanks(text, at)
        if text[at : at + 1] == ",":
            at = _blanks(text, at + 1)
        elif text[at : at + 1] != closes:
            raise ValueError("neither a comma nor an end")
    return (table if named else items), at + 1


def _blanks(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def primitive(text: str) -> Any:
    """A word as a number, truth value or nothing, where it is one."""
    known = {"null": None, "": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    if NUMBER.fullmatch(text) and any(sign.isdigit() for sign in text):
        try:
            return int(text)
        except ValueError:
            return float(text)
    return text
