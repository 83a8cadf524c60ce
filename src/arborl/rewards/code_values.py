"""Values that code under test computed: how they leave the sandbox, and how they are compared.

What arrives was written by that code. It may be anything, and whatever cannot be read or compared is no right answer.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

HARNESS = """
def _judge(source, mark, cases):
    import json, os, sys
    say = os.fdopen(os.dup(1), "w")
    names = {"__name__": "solution"}
    def pack(x):
        if x is None or isinstance(x, (bool, str, float)):
            return x
        if isinstance(x, int):
            return int(x) if abs(x) < 2**53 else {"int": hex(x)}
        if isinstance(x, list):
            return [pack(part) for part in x]
        for kind, tag in ((tuple, "tuple"), (set, "set"), (frozenset, "set")):
            if isinstance(x, kind):
                return {tag: [pack(part) for part in x]}
        if isinstance(x, dict):
            return {"dict": [[pack(key), pack(value)] for key, value in x.items()]}
        if isinstance(x, bytes):
            return {"bytes": x.hex()}
        if isinstance(x, complex):
            return {"complex": [x.real, x.imag]}
        if hasattr(x, "as_integer_ratio"):
            return {"ratio": [hex(part) for part in x.as_integer_ratio()]}
        if hasattr(x, "__index__"):
            return {"int": hex(x.__index__())}
        if hasattr(x, "__iter__"):
            return {"items": [pack(part) for part in x]}
        return {"object": ""}
    def ask(case):
        if isinstance(case[0], str):
            function, args, kwargs = case
            found = names.get(function) or getattr(names["Solution"](), function)
            return [pack(found(*args, **kwargs))]
        answers = []
        for code, asks in case:
            if asks:
                answers.append(pack(eval(compile(code, "test", "eval"), names)))
            else:
                exec(compile(code, "test", "exec"), names)
        return answers
    try:
        exec(compile(source, "solution", "exec"), names)
    except SystemExit:
        pass
    for number, case in enumerate(cases):
        try:
            text = json.dumps(ask(case))
        except BaseException:
            continue
        sys.stdout.flush()
        say.write(f"\\n{mark} {number} {text}\\n")
        say.flush()
"""
"""Says the values of each case behind a mark, to tell them from what the code prints. Code that finds the mark can only
answer for itself: what would be right is not there to be found."""


class Items:
    """What can be gone through and is no list: a generator, a range. Equal to nothing."""

    def __init__(self, parts: Sequence[Any]):
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def harness(code: str, rows: Sequence[Any]) -> tuple[str, str]:
    """The program that runs the code and answers the questions in `rows`, and the mark its answers have."""
    mark = secrets.token_hex(16)
    told = f"_judge({code!r}, {mark!r}, __import__('json').loads({json.dumps(rows)!r}))"
    return f"{HARNESS}\n{told}", mark


def read_answers(printed: str, mark: str) -> dict[int, list[Any]]:
    """The values of each case that was answered; lines that are not of that form answer nothing."""
    answers: dict[int, list[Any]] = {}
    for line in printed.splitlines():
        if line.startswith(f"{mark} "):
            try:
                _, number, text = line.split(" ", 2)
                answers[int(number)] = [unpack(value) for value in json.loads(text)]
            except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError):
                continue  # not written by the harness, or too deep or long to be a value
    return answers


def unpack(value: Any) -> Any:
    """A value as the code had it, of Python's own kinds."""
    if isinstance(value, list):
        return [unpack(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, given),) = value.items()
    match kind:
        case "int":
            return int(given, 16)  # of this base any number of digits is read quickly
        case "ratio":
            return Fraction(*(int(part, 16) for part in given))
        case "complex":
            return complex(*given)
        case "bytes":
            return bytes.fromhex(given)
        case "tuple":
            return tuple(map(unpack, given))
        case "set":
            return set(map(unpack, given))
        case "items":
            return Items(list(map(unpack, given)))
        case "dict":
            return {unpack(key): unpack(part) for key, part in given}
    return object()


def same_value(given: Any, wanted: Any) -> bool:
    """Equal as JSON; numbers up to rounding. What cannot be compared is not equal."""
    try:
        return _same(plain(given), wanted)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return False


def plain(value: Any) -> Any:
    """The JSON form of a value: what holds others is a list, sets in order, names of an object are text."""
    if isinstance(value, list | tuple | Items):
        return [plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, dict):
        return {_name(key): plain(part) for key, part in value.items()}
    return float(value) if isinstance(value, Fraction) else value


def _name(key: Any) -> str:
    """As JSON writes a key."""
    return key if isinstance(key, str) else json.dumps(key) if isinstance(key, bool | None) else str(key)


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool) or given is None or wanted is None:
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        return given == wanted or math.isclose(given, wanted, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(given, list) and isinstance(wanted, list | tuple):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, Mapping):
        keyed = {_name(key): value for key, value in wanted.items()}
        return given.keys() == keyed.keys() and all(_same(given[key], keyed[key]) for key in given)
    return bool(given == wanted)
