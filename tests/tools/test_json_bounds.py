"""Bounds on JSON hold for the objects that a parser would build, and count nothing that stands inside a string."""

import json
import random

import pytest

from arborl.tools.core.json_bounds import JsonBounds, JsonBoundsError, check_json, load_json

LEAVES = [1, -2.5e10, None, True, 'a"b', "\\", '\\"', "\\\\", "[[[", '{"a": [1, 2]}', "", "\u20ac,:", "\ud800"]
KEYS = ["a", '"', "\\", "[", "é", ":,"]


def made(rng, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice(LEAVES)
    if kind < 0.7:
        return [made(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS) + str(number): made(rng, depth - 1) for number in range(rng.randrange(4))}


def counted(value):
    """Values and keys, those of them that are no numbers or literals, and depth; by walking over the objects."""
    if isinstance(value, dict | list):
        inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
        keys = len(value) if isinstance(value, dict) else 0
        values, costly, depths = zip(*inner, strict=True) if inner else ((), (), (0,))
        return 1 + keys + sum(values), 1 + keys + sum(costly), 1 + max(depths)
    return 1, int(isinstance(value, str)), 0


def test_what_passes_is_within_the_bounds_and_what_is_well_within_them_passes():
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(20_000):
        value = made(rng, rng.randrange(8))
        bounds = JsonBounds(rng.randrange(1, 6), rng.randrange(1, 60), rng.randrange(1, 40))
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        values, costly, depth = counted(value)
        try:
            assert check_json(text.encode("utf-8", "surrogatepass"), bounds) >= costly
            passed = True
        except JsonBoundsError:
            passed = False
        seen[passed] += 1
        within = values <= bounds.values and costly <= bounds.costly and depth <= bounds.depth
        assert within or not passed, (value, bounds)
        assert passed or not (within and 2 * values < bounds.values), (value, bounds)
    assert min(seen.values()) > 1000


@pytest.mark.parametrize(
    "text",
    [
        "[" * 65 + "]" * 65,
        "[" * 1_000_000,
        "[" * 70 + "]" * 1_000_000,
        '{"a":' * 65 + "1" + "}" * 65,
        "[" + "{}," * 65_536 + "{}]",
        "[" + '"",' * 65_536 + '""]',
        "[" + '"\\\\",' * 65_536 + '""]',
        "[" + "1," * 262_144 + "1]",
    ],
)
def test_too_deep_or_too_many_is_refused(text):
    with pytest.raises(JsonBoundsError):
        load_json(text.encode())


def test_long_text_marks_and_surrogates_are_read():
    text = '[1, {"a": "b"}], "' * 100_000
    assert load_json(json.dumps({"content": text}).encode()) == {"content": text}
    assert len(load_json(("[" + "1," * 200_000 + "1]").encode())) == 200_001  # token ids
    assert load_json(b'\xef\xbb\xbf["\\ud800", "\xed\xa0\x80"]') == ["\ud800", "\ud800"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be"])
def test_an_encoding_that_would_be_counted_wrongly_is_refused(encoding):
    """`json.loads` finds such encodings out by itself, and then sees other strings than were counted."""
    text = "[" + '"\\"[",' * 10 + "1]"
    with pytest.raises(ValueError, match=r"decode|Expecting"):
        load_json(text.encode(encoding))
