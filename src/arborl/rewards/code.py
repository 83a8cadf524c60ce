"""Code judged by what it does: programs by what they print, functions by what they return, in the sandbox.

What is expected never enters the sandbox. Values come out and are compared outside, so code cannot pass by looking.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arborl.chat.formats.fence import FenceParser
from arborl.rewards.asserts import Asserts, read_asserts
from arborl.rewards.code_values import harness, read_answers, same_value
from arborl.rewards.fields import field_of
from arborl.rewards.tags import last_tagged
from arborl.sandbox import SandboxLimits, SandboxResult, run_code
from arborl.types import Episode

Run = Callable[[str, str], Awaitable[SandboxResult]]
"""(code, standard input) -> what became of it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test: a program's input and output, a function call and its value, or asserts."""

    wanted: Any = None
    """What is printed, or returned."""
    stdin: str = ""
    function: str = ""
    """Empty for a program."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    asserts: Asserts | None = None


class CodeTests:
    """1 where the code of the final answer passes all tests, else 0; or the share it passes.

    The tests are a field of the task: a list of `{"input": …, "output": …}` (a program's standard input and output),
    `{"function": …, "args": […], "returns": …}` and texts such as `"assert add(1, 2) == 3"` (see `asserts.py`); or an
    object of the form `{"inputs": […], "outputs": […], "fn_name": …}` as TACO has it. JSON text of these will do.

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
    sandboxed = True

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
        self.limits = SandboxLimits(wall_seconds=2 * seconds, cpu_seconds=seconds, memory_mb=memory_mb)

    async def __call__(self, episode: Episode) -> float:
        cases = read_cases(field_of(episode, self.field, f"reward {self.name!r}"))[: self.max_cases]
        passed = await judge(final_code(episode.answer), cases, self._run)
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    async def _run(self, code: str, stdin: str) -> SandboxResult:
        return await run_code(code, stdin, limits=self.limits)


def final_code(text: str) -> str:
    """The code that an answer gives."""
    fenced = [call.arguments["code"] for call in FenceParser().parse(text) if call.error is None]
    if fenced:
        return str(fenced[-1])
    tagged = last_tagged(text, "code", "answer")
    return text if tagged is None else tagged.strip("\n")


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
        return Case(asserts=read_asserts(row))
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
    calls = [case for case in cases if case.function or case.asserts]
    programs = [case for case in cases if not (case.function or case.asserts)]
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


async def _call_all(code: str, cases: Sequence[Case], run: Run) -> list[bool]:
    """Function calls and asserts, all in one process: questions go in, values come out."""
    if not cases:
        return []
    rows = [_questions(case) for case in cases]
    program, mark = harness(code, rows)
    answers = read_answers((await run(program, "")).stdout, mark)
    return [number in answers and _passes(case, answers[number]) for number, case in enumerate(cases)]


def _questions(case: Case) -> list[Any]:
    """What the sandbox is told of a case: never what is expected."""
    if case.asserts is not None:
        return [[step.code, step.asks] for step in case.asserts.steps]
    return [case.function, list(case.args), dict(case.kwargs)]


def _passes(case: Case, answers: list[Any]) -> bool:
    if case.asserts is not None:
        return case.asserts.hold(answers)
    return len(answers) == 1 and same_value(answers[0], case.wanted)
