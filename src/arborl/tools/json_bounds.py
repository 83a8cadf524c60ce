"""Bounds on JSON from a client, checked on its bytes before any object is built.

A body of two megabytes may hold 700,000 empty objects. Parsing, validating and copying them costs seconds and
gigabytes. The check counts, builds no objects, and takes time linear in the size of the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""The possessive quantifiers keep it linear in the text."""
ALIKE = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class JsonBoundsError(ValueError):
    """The JSON exceeds a bound."""


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Limits of one JSON text."""

    depth: int = 64
    """Objects and arrays within each other."""
    values: int = 2**18
    """Values and keys in total. This also limits the length of an array and the number of keys of an object."""


DEFAULT_BOUNDS = JsonBounds()


def check_json(data: bytes, bounds: JsonBounds = DEFAULT_BOUNDS) -> int:
    """At most this many values and keys are in a JSON text in UTF-8.

    Whether the text is valid JSON is not checked. A parser that stops at the first error has built no more than was
    counted up to there.

    Raises:
        JsonBoundsError: the text exceeds a bound.
    """
    count, depth = _count(data)  # what stands inside strings is counted too: at worst too many
    if count <= bounds.values and depth <= bounds.depth:
        return count
    # A string has two quotes that are not escaped, or one where it ends with an escaped backslash.
    if data.count(b'"') - data.count(b'\\"') > 2 * bounds.values:
        raise _too_many(bounds)
    bare = STRING.sub(b"", data)
    count, depth = _count(bare)
    if count > bounds.values:
        raise _too_many(bounds)
    if depth > bounds.depth:
        _check_depth(bare.translate(ALIKE, NO_BRACKETS), depth, bounds)
    return count


def _count(text: bytes) -> tuple[int, int]:
    """Bounds on the values and keys, and on the depth, from the signs that come before or after each of them."""
    opened = text.count(b"[") + text.count(b"{")
    return 1 + opened + text.count(b",") + text.count(b":"), opened


def _check_depth(brackets: bytes, opened: int, bounds: JsonBounds) -> None:
    """Remove the innermost pairs, one level at a time."""
    for _ in range(bounds.depth if len(brackets) == 2 * opened else 0):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise JsonBoundsError(f"the JSON is nested more than {bounds.depth} levels deep, or its brackets do not match")


def _too_many(bounds: JsonBounds) -> JsonBoundsError:
    return JsonBoundsError(f"the JSON has more than {bounds.values:,} values and keys")


def load_json(data: bytes, bounds: JsonBounds = DEFAULT_BOUNDS) -> Any:
    """The value of a JSON text in UTF-8, within bounds. Other encodings are refused: the check would misread them.

    Raises:
        ValueError: the data is not UTF-8 or not JSON, or exceeds a bound (`JsonBoundsError`).
    """
    check_json(data, bounds)
    return json.loads(data.decode("utf-8-sig", "surrogatepass"))
