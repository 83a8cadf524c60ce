"""Code judged by what it does: programs by what they print, functions by what they return, in the sandbox.

What is expected never enters the sandbox. Values come out and are compared outside, so code cannot pass by looking.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arborl.chat.formats.fence import FenceParser
from arborl.rewards.fields import field_of
from arborl.sandbox import Limits, Outcome, run_code
from arborl.types import Episode

Run = Callable[[str, str], Awaitable[Outcome]]
"""(code, standard input) -> what became of it."""

TAGGED = re.compile(r"<(code|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Case:
    """One test: a program's input and output, a function call and its value, or a statement that must not raise."""

    wanted: Any = None
    """What is printed, or returned."""
    stdin: str = ""
    function: str = ""
    """Empty for a program."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    statement: str = ""


class CodeTests:
    """1 where the code of the final answer passes all tests, else 0; or the share it passes.

    The tests are a field of the task: a list of `{"input": …, "output": …}` (a program's standard input and output),
    `{"function": …, "args": […], "returns": …}` and texts such as `"assert add(1, 2) == 3"`; or an object of the form
    `{"inputs": […], "outputs": […], "fn_name": …}` as TACO has it. JSON text of these will do.

    The code is the last fenced block of the answer; without one, the last `<code>` or `<answer>`; without these, all of
    it.

    Example:
        rewards: [{name: code_tests, args: {partial: true, seconds: 2}}]

    Args:
        field: the task's field that holds the tests.
        partial: give the share of tests passed.
        seconds: what a program, or all function calls together, may take.
        memory_mb: memory of a run.
        max_cases: tests beyond these are not run.
    """

    name = "code_tests"

    def __init__(
        self,
        field: str = "tests",
        partial: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 256,
        max_cases: int = 50,
    ):
        if max_cases < 1:
            raise ValueError(f"max_cases={max_cases}: give 1 or more")
        self.field, self.partial, self.max_cases = field, partial, max_cases
        self.limits = Limits(wall_seconds=2 * seconds, cpu_seconds=seconds, memory_mb=memory_mb)

    async def __call__(self, episode: Episode) -> float:
        cases = read_cases(field_of(episode, self.field, f"reward {self.name!r}"))[: self.max_cases]
        passed = await judge(final_code(episode.answer), cases, self._run)
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    async def _run(self, code: str, stdin: str) -> Outcome:
        return await run_code(code, stdin, limits=self.limits)


def final_code(text: str) -> str:
    """The code that an answer gives."""
    fenced = [call.arguments["code"] for call in FenceParser().parse(text) if call.error is None]
    if fenced:
        return str(fenced[-1])
    tagged = TAGGED.findall(text)
    return str(tagged[-1][1]).strip("\n") if tagged else text


def read_cases(given: Any) -> list[Case]:
    """Tests in any of the known forms; ValueError for others, and where there are none."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        given = json.loads(given)
    if isinstance(given, Mapping) and "inputs" in given:
        given = _pairs(given)
    rows = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError('no tests there. Write [{"input": "1", "output": "2"}], or see docs/agents.md')
    return [_case(row) for row in rows]


def _pairs(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """TACO's form: for a function each input is its list of arguments, for a program a text or the lines of one."""
    name, rows = given.get("fn_name"), zip(given["inputs"], given.get("outputs", ()), strict=True)
    if not name:
        return [{"input": _lines(before), "output": _lines(after)} for before, after in rows]
    return [{"function": name, "args": before, "returns": _alone(after)} for before, after in rows]


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _alone(value: Any) -> Any:
    """TACO wraps what a function returns in a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _case(row: Any) -> Case:
    if isinstance(row, str):
        return Case(statement=row)
    if isinstance(row, Mapping) and "function" in row and "returns" in row:
        args = row.get("args", [])
        return Case(row["returns"], "", str(row["function"]), tuple(args), dict(row.get("kwargs", {})))
    if isinstance(row, Mapping) and "output" in row:
        return Case(str(row["output"]), str(row.get("input", "")))
    raise ValueError(
        f"not a test: {str(row)[:80]}. Write {{'input': …, 'output': …}}, {{'function': …, 'args': […], "
        "'returns': …}} or the text of an assert"
    )


async def judge(code: str, cases: Sequence[Case], run: Run) -> list[bool]:
    """Which cases the code passes. Programs run one by one, all function calls in one process."""
    calls = [case for case in cases if case.function or case.statement]
    programs = [case for case in cases if not (case.function or case.statement)]
    answers, outcomes = await asyncio.gather(
        _call_all(code, calls, run), asyncio.gather(*(run(code, case.stdin) for case in programs))
    )
    passed = dict(zip(map(id, calls), answers, strict=True))
    for case, outcome in zip(programs, outcomes, strict=True):
        passed[id(case)] = outcome.ok and same_output(outcome.stdout, case.wanted)
    return [passed[id(case)] for case in cases]


def same_output(printed: str, wanted: str) -> bool:
    """Equal line by line, white space at the ends of lines and of the whole aside."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return lines(printed) == lines(wanted)


def same_value(given: Any, wanted: Any) -> bool:
    """Equal as JSON; numbers up to rounding."""
    if isinstance(given, bool) or isinstance(wanted, bool) or given is None or wanted is None:
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        return given == wanted or math.isclose(given, wanted, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(given, list) and isinstance(wanted, list | tuple):
        return len(given) == len(wanted) and all(map(same_value, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, Mapping):
        keyed = {str(key): value for key, value in wanted.items()}
        return given.keys() == keyed.keys() and all(same_value(given[key], keyed[key]) for key in given)
    return bool(given == wanted)


HARNESS = """
def _judge(source, mark, cases):
    import json, os, sys
    say = os.fdopen(os.dup(1), "w")
    names = {"__name__": "solution"}
    try:
        exec(compile(source, "solution", "exec"), names)
    except SystemExit:
        pass
    for number, (function, args, kwargs, statement) in enumerate(cases):
        try:
            if statement:
                exec(compile(statement, "test", "exec"), names)
                value = True
            else:
                found = names.get(function) or getattr(names["Solution"](), function)
                value = found(*args, **kwargs)
            text = json.dumps(value, default=lambda x: sorted(x) if isinstance(x, (set, frozenset)) else list(x))
        except BaseException:
            continue
        sys.stdout.flush()
        say.write(f"\\n{mark} {number} {text}\\n")
        say.flush()
"""
"""Says the value of each call behind a mark that the code cannot know."""


async def _call_all(code: str, cases: Sequence[Case], run: Run) -> list[bool]:
    if not cases:
        return []
    mark = secrets.token_hex(16)
    rows = [(case.function, list(case.args), dict(case.kwargs), case.statement) for case in cases]
    told = f"_judge({code!r}, {mark!r}, __import__('json').loads({json.dumps(rows)!r}))"
    outcome = await run(f"{HARNESS}\n{told}", "")
    said: dict[int, Any] = {}
    for line in outcome.stdout.splitlines():
        if line.startswith(f"{mark} "):
            _, number, text = line.split(" ", 2)
            said[int(number)] = json.loads(text)
    return [
        number in said and same_value(said[number], True if case.statement else case.wanted)
        for number, case in enumerate(cases)
    ]
