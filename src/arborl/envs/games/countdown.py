"""Countdown: make the target from the numbers, each used once, with + - * / and brackets.

    Numbers: 3, 7, 25   Target: 46      ->      <answer>25 + 3 * 7</answer>

A problem is drawn as an expression, which is the oracle's answer.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from arborl.envs.env import Observation, Step, check_split, format_answer, parse_answer, split_of, task_split
from arborl.envs.games.text_game import TextGame, require
from arborl.seeds import generator
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS = "+-*/"
MAX_LENGTH = 200
"""Maximum number of characters of an expression."""
MAX_DRAWS = 10_000
INVALID = "Not an expression of these numbers, each used once."


@dataclass(eq=False)
class Countdown(TextGame):
    """Make a target from some numbers, each used once."""

    blocking = False
    tagged = True
    rules, invalid = "", INVALID

    count: int = 3
    """Number of numbers."""
    largest: int = 20
    """Maximum number."""
    max_target: int = 100
    """Maximum target."""
    tries: int = 3
    """Number of attempts; the value of each is returned."""
    format_penalty: float = -0.05
    """Reward of a message that is not an expression of exactly these numbers."""

    def __post_init__(self) -> None:
        require(2 <= self.count <= 8, f"count={self.count}: give a number from 2 to 8")
        smallest = f"largest={self.largest}, max_target={self.max_target}: give at least 2 of each"
        require(min(self.largest, self.max_target) >= 2, smallest)
        require(self.tries >= 1, f"tries={self.tries}: give at least 1")
        self.max_steps = self.tries
        self.check_limits()

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "countdown")
        self.problem = draw_problem(task.seed, split, self.count, self.largest, self.max_target)
        self.results: tuple[str, ...] = ()
        self.solved = False
        return self.opening(
            f"Make {self.problem.target} out of {', '.join(map(str, self.problem.numbers))}. Use each number once, "
            "with + - * / and brackets. Answer with an expression: <answer>1 + 2 * 3</answer>."
        )

    async def step(self, action: Message) -> Step:
        value = value_of(parse_answer(action.content), self.problem.numbers)
        self.solved = value == self.problem.target
        verdict = INVALID if value is None else f"That makes {value}."
        self.results = (*self.results, verdict)
        self.valid += value is not None
        text = "Right." if self.solved else f"{verdict} Make {self.problem.target}."
        return Step(
            Observation((Message("user", text),), state_key=self.state_key()),
            reward=self.format_penalty if value is None else float(self.solved),
            terminated=self.solved,
            truncated=not self.solved and len(self.results) >= self.max_steps,
            info={"valid": float(value is not None)},
        )

    def metrics(self) -> Metrics:
        played = len(self.results)
        return {"success": float(self.solved), "valid": self.valid / max(played, 1), "tries": float(played)}

    def oracle(self) -> str:
        return format_answer(self.problem.solution)

    def random(self, rng: Generator) -> str:
        """A random expression with a value."""
        while True:
            text = _draw_expression(rng, list(self.problem.numbers))
            if value_of(text, self.problem.numbers) is not None:
                return format_answer(text)

    def state_key(self) -> str:
        return " ".join([str(self.problem.target), *map(str, self.problem.numbers), *sorted(set(self.results))])

    def render(self) -> str:
        numbers = " ".join(f"[{number}]" for number in self.problem.numbers)
        return "\n".join([f"Target: {self.problem.target}", f"Numbers: {numbers}", *self.results])


@dataclass(frozen=True, slots=True)
class CountdownProblem:
    """Numbers, target, and one solution."""

    numbers: tuple[int, ...]
    target: int
    solution: str


@lru_cache(maxsize=8192)
def draw_problem(seed: int, split: str, count: int, largest: int, max_target: int) -> CountdownProblem:
    """A problem of this split; deterministic on every machine."""
    check_split(split, "countdown")
    rng = generator(seed, "countdown", count)
    for _ in range(MAX_DRAWS):
        numbers = tuple(int(number) for number in rng.integers(1, largest + 1, size=count))
        text = _draw_expression(rng, list(numbers))
        value = value_of(text, numbers)
        if value is None or value.denominator != 1 or not 1 <= value <= max_target:
            continue
        if split_of((tuple(sorted(numbers)), int(value))) == split:
            return CountdownProblem(numbers, int(value), text)
    raise ValueError(
        f"no problem of split {split!r} in {MAX_DRAWS:,} draws with count={count}, largest={largest}, "
        f"max_target={max_target}: give larger numbers"
    )


def _draw_expression(rng: Generator, numbers: list[int]) -> str:
    """A random expression: combine two random parts until one is left."""
    parts = [str(number) for number in numbers]
    while len(parts) > 1:
        left = parts.pop(int(rng.integers(len(parts))))
        right = parts.pop(int(rng.integers(len(parts))))
        joined = f"{left} {SIGNS[int(rng.integers(4))]} {right}"
        parts.append(f"({joined})" if parts else joined)
    return parts[0]


def value_of(text: str | None, numbers: tuple[int, ...]) -> Fraction | None:
    """The exact value of an expression of exactly these numbers; None for any other text or a division by zero."""
    if text is None or len(text) > MAX_LENGTH:
        return None
    used: list[int] = []
    try:
        value = _walk(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if sorted(used) == sorted(numbers) else None


def _walk(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_walk(left, used), _walk(right, used))
    raise ValueError("not plain arithmetic")
