"""Arithmetic on the syntax tree: no `eval`, bounded cost."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from arborl.tools.core.tool import tool

Number = int | float

MAX_LENGTH = 500
MAX_DIGITS = 300

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., Any]] = {"sqrt": math.sqrt, "abs": abs, "min": min, "max": max, "round": round}
USAGE = f"Write numbers, + - * / // % **, parentheses and {', '.join(FUNCTIONS)}."


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example (2 + 3) * 4 or sqrt(2) ** 2.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters; {MAX_LENGTH} is the limit")
    try:
        value = value_of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an expression. {USAGE}") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return repr(int(value) if is_whole else value)


def value_of(node: ast.expr) -> Number:
    """Value of one node; every intermediate result is checked against `MAX_DIGITS`."""
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return check_number(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return check_number(UNARY[type(op)](value_of(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return power(value_of(left), value_of(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return check_number(BINARY[type(op)](value_of(left), value_of(right)))
        case ast.BinOp(op=ast.BitXor()):
            raise ValueError("^ is not a power here; write **")
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return apply(name, [value_of(arg) for arg in args])
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not arithmetic. {USAGE}")


def power(base: Number, exponent: Number) -> Number:
    """`base ** exponent`; a result that would be too long is refused before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and abs(exponent) > 1:
        digits = math.log10(abs(base)) * abs(exponent)
        if digits > MAX_DIGITS:
            raise ValueError(f"the result exceeds {MAX_DIGITS} digits")
    try:
        return check_number(base**exponent)
    except OverflowError:
        raise ValueError(f"the result exceeds {MAX_DIGITS} digits") from None


def apply(name: str, values: list[Number]) -> Number:
    if not values:
        raise ValueError(f"{name}() needs a number")
    if name == "round" and len(values) == 2 and not (isinstance(values[1], int) and abs(values[1]) <= MAX_DIGITS):
        raise ValueError(f"round(x, n) takes a whole n of at most {MAX_DIGITS}")
    if name in ("min", "max"):
        return check_number(FUNCTIONS[name](values))
    return check_number(FUNCTIONS[name](*values))


def check_number(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if not abs(value) < 10**MAX_DIGITS:  # also true of nan
        raise ValueError(f"the result exceeds {MAX_DIGITS} digits")
    return value  # type: ignore[no-any-return]
