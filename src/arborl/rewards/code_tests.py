"""Code tested in the sandbox: programs by their output, functions by their return values.

Expected values never enter the sandbox. Values come out and are compared outside, so code cannot read the answers.
What comes out was written by the tested code and may be anything; what cannot be read or compared is a wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from arborl.chat.formats.text_formats import FenceParser
from arborl.rewards.answers import field_of, last_tagged
from arborl.rewards.asserts import Asserts, read_asserts
from arborl.sandbox import SandboxLimits, SandboxResult, run_code
from arborl.types import Episode

RunCode = Callable[[str, str], Awaitable[SandboxResult]]
"""(code, standard input) -> outcome."""


@dataclass(frozen=True, slots=True)
class CodeCase:
    """One test: a program's input and output, a function call and its value, or asserts."""

    expected: Any = None
    """Expected output or return value."""
    stdin: str = ""
    function: str = ""
    """Empty for a program."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    asserts: Asserts | None = None

    def request(self) -> list[Any]:
        """What the sandbox receives, without expected values."""
        if self.asserts is not None:
            return [[step.code, step.is_expression] for step in self.asserts.steps]
        return [self.function, list(self.args), dict(self.kwargs)]

    def passes(self, answers: list[Any]) -> bool:
        if self.asserts is not None:
            return self.asserts.hold(answers)
        return len(answers) == 1 and same_value(answers[0], self.expected)


@dataclass(eq=False)
class CodeTests:
    """1 if the code of the final answer passes all tests, else 0; or the share of tests passed.

    The tests are a field of the task: a list of `{"input": …, "output": …}` (standard input and output of a program),
    `{"function": …, "args": […], "returns": …}` and texts such as `"assert add(1, 2) == 3"` (see `asserts.py`); or
    TACO's `{"inputs": […], "outputs": […], "fn_name": …}`. JSON text of these is accepted.

    The code is the last fenced block of the answer, else the last `<code>` or `<answer>`, else the whole answer.

    Example:
        rewards: [{name: code_tests, args: {partial: true, seconds: 2}}]
    """

    name = "code_tests"
    sandboxed = True

    field: str = "tests"
    """Of the task, with the tests."""
    partial: bool = False
    """Return the share of tests passed."""
    seconds: float = 5.0
    """CPU time of a program, or of all function calls together."""
    memory_mb: int = 256
    """Memory of a run."""
    max_cases: int = 50
    """Number of tests that are run."""

    def __post_init__(self) -> None:
        if self.max_cases < 1:
            raise ValueError(f"max_cases={self.max_cases}: give 1 or more")
        self.limits = SandboxLimits(wall_seconds=2 * self.seconds, cpu_seconds=self.seconds, memory_mb=self.memory_mb)

    async def __call__(self, episode: Episode) -> float:
        cases = read_cases(field_of(episode, self.field, f"reward {self.name!r}"))[: self.max_cases]
        passed = await run_cases(final_code(episode.answer), cases, self._run)
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    async def _run(self, code: str, stdin: str) -> SandboxResult:
        return await run_code(code, stdin, limits=self.limits)


def final_code(text: str) -> str:
    fenced = [call.arguments["code"] for call in FenceParser().parse(text) if call.error is None]
    if fenced:
        return str(fenced[-1])
    tagged = last_tagged(text, "code", "answer")
    return text if tagged is None else tagged.strip("\n")


def read_cases(tests: Any) -> list[CodeCase]:
    """Tests in any known format; ValueError for others and for an empty list."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        tests = json.loads(tests)
    if isinstance(tests, Mapping) and "inputs" in tests:
        tests = _taco_rows(tests)
    rows = [tests] if isinstance(tests, str | Mapping) else tests
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError('there are no tests. Write [{"input": "1", "output": "2"}], or see docs/agents.md')
    return [_case(row) for row in rows]


def _taco_rows(tests: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """TACO's format: inputs are lists of arguments of a function, or texts (or lists of lines) for a program."""
    name, rows = tests.get("fn_name"), list(zip(tests["inputs"], tests.get("outputs", ()), strict=True))
    if name:  # the returned value is wrapped in a list of one
        values = [after[0] if isinstance(after, list) and len(after) == 1 else after for _, after in rows]
        return [{"function": name, "args": row[0], "returns": value} for row, value in zip(rows, values, strict=True)]
    lines = [["\n".join(map(str, one)) if isinstance(one, list) else str(one) for one in row] for row in rows]
    return [{"input": before, "output": after} for before, after in lines]


def _case(row: Any) -> CodeCase:
    if isinstance(row, str):
        return CodeCase(asserts=read_asserts(row))
    if isinstance(row, Mapping) and "function" in row and "returns" in row:
        args = row.get("args", [])
        return CodeCase(row["returns"], "", str(row["function"]), tuple(args), dict(row.get("kwargs", {})))
    if isinstance(row, Mapping) and "output" in row:
        return CodeCase(str(row["output"]), str(row.get("input", "")))
    raise ValueError(
        f"not a test: {str(row)[:80]}. Write {{'input': …, 'output': …}}, {{'function': …, 'args': […], "
        "'returns': …}} or the text of an assert"
    )


async def run_cases(code: str, cases: Sequence[CodeCase], run: RunCode) -> list[bool]:
    """Which cases the code passes. Programs run one by one, all function calls in one process."""
    calls = [case for case in cases if case.function or case.asserts]
    programs = [case for case in cases if not (case.function or case.asserts)]
    answers, outcomes = await asyncio.gather(
        _call_all(code, calls, run), asyncio.gather(*(run(code, case.stdin) for case in programs))
    )
    passed = dict(zip(map(id, calls), answers, strict=True))
    for case, outcome in zip(programs, outcomes, strict=True):
        passed[id(case)] = outcome.ok and same_output(outcome.stdout, case.expected)
    return [passed[id(case)] for case in cases]


def same_output(printed: str, expected: str) -> bool:

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return lines(printed) == lines(expected)


async def _call_all(code: str, cases: Sequence[CodeCase], run: RunCode) -> list[bool]:
    if not cases:
        return []
    program, mark = harness(code, [case.request() for case in cases])
    answers = read_answers((await run(program, "")).stdout, mark)
    return [number in answers and case.passes(answers[number]) for number, case in enumerate(cases)]


# ------------------------------------------------------------------------------------------------ values

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
"""Writes the values of each case after a random mark, to separate them from the output of the code. Code that finds the
mark can only fake its own values; the expected ones are not in the process."""


class IteratedItems:
    """Values of a generator or a range. Equal to nothing."""

    def __init__(self, parts: Sequence[Any]):
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def harness(code: str, rows: Sequence[Any]) -> tuple[str, str]:
    """The program that runs the code and the requests in `rows`, and the mark of its answers."""
    mark = secrets.token_hex(16)
    call = f"_judge({code!r}, {mark!r}, __import__('json').loads({json.dumps(rows)!r}))"
    return f"{HARNESS}\n{call}", mark


def read_answers(printed: str, mark: str) -> dict[int, list[Any]]:
    """The values of each case; malformed lines are ignored."""
    answers: dict[int, list[Any]] = {}
    for line in printed.splitlines():
        if line.startswith(f"{mark} "):
            try:
                _, number, text = line.split(" ", 2)
                answers[int(number)] = [unpack(value) for value in json.loads(text)]
            except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError):
                continue  # not written by the harness, or too deep or long
    return answers


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "int":
            return int(content, 16)  # fast for any number of digits
        case "ratio":
            return Fraction(*(int(part, 16) for part in content))
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes.fromhex(content)
        case "tuple":
            return tuple(map(unpack, content))
        case "set":
            return set(map(unpack, content))
        case "items":
            return IteratedItems(list(map(unpack, content)))
        case "dict":
            return {unpack(key): unpack(part) for key, part in content}
    return object()


def same_value(value: Any, expected: Any) -> bool:
    """Equal as JSON, numbers up to rounding. Values that cannot be compared are not equal."""
    try:
        return _same(as_json_value(value), expected)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return False


def as_json_value(value: Any) -> Any:
    """The JSON form of a value: sequences and sorted sets are lists, keys are text."""
    if isinstance(value, list | tuple | IteratedItems):
        return [as_json_value(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(as_json_value, value))
    if isinstance(value, dict):
        return {_key(key): as_json_value(part) for key, part in value.items()}
    return float(value) if isinstance(value, Fraction) else value


def _key(key: Any) -> str:
    return json.dumps(key) if isinstance(key, bool | None) else str(key)


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool) or value is None or expected is None:
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        keyed = {_key(key): value for key, value in expected.items()}
        return value.keys() == keyed.keys() and all(_same(value[key], keyed[key]) for key in value)
    return bool(value == expected)
