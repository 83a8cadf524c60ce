"""Bounds of untrusted JSON, checked before parsing.

Two megabytes can contain 700,000 empty objects, which cost seconds and gigabytes to parse. The check counts in linear
time and creates no objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class JsonBoundsError(ValueError):
    """The JSON exceeds a bound."""


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Limits of one JSON text."""

    depth: int = 64
    values: int = 2**18  # Values and keys in total. This also limits the length of an array.
    costly: int = 2**16  # strings, keys, objects and arrays in total: all that costs more than a number


DEFAULT_BOUNDS = JsonBounds()


def check_json(data: bytes, bounds: JsonBounds = DEFAULT_BOUNDS) -> int:
    """Upper bound of the number of strings, keys, objects and arrays in a JSON text in UTF-8; JsonBoundsError if the
    text exceeds a bound. The text need not be valid JSON: a parser creates at most the counted objects before its first
    error."""
    values, opened = _count(data)  # includes the content of strings: an upper bound
    costly = opened + data.count(b'"')
    if values <= bounds.values and costly <= bounds.costly and opened <= bounds.depth:
        return costly
    quotes = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes delimit strings
    strings = (quotes.count(b'"') + 1) // 2
    bare = b"".join(quotes.split(b'"')[::2]) if strings <= bounds.costly else b""
    values, opened = _count(bare)
    if values > bounds.values:
        raise JsonBoundsError(f"the JSON has more than {bounds.values:,} values and keys")
    if strings + opened > bounds.costly:
        raise JsonBoundsError(f"the JSON has more than {bounds.costly:,} strings, keys, objects and arrays")
    if opened > bounds.depth:
        brackets = bare.translate(BRACES_TO_BRACKETS, NOT_BRACKETS)
        for _ in range(bounds.depth if len(brackets) == 2 * opened else 0):  # remove the innermost pairs
            brackets = brackets.replace(b"[]", b"")
        if brackets:
            raise JsonBoundsError(f"the JSON is nested more than {bounds.depth} deep, or its brackets do not match")
    return strings + opened


def _count(text: bytes) -> tuple[int, int]:
    """Upper bound of values and keys, and the number of objects and arrays, outside strings."""
    opened = text.count(b"[") + text.count(b"{")
    return 1 + opened + text.count(b",") + text.count(b":"), opened


def load_json(data: bytes, bounds: JsonBounds = DEFAULT_BOUNDS) -> Any:
    """The value of a JSON text in UTF-8, within bounds; ValueError for other encodings and invalid JSON."""
    check_json(data, bounds)
    return json.loads(data.decode("utf-8", "surrogatepass").removeprefix("\ufeff"))
