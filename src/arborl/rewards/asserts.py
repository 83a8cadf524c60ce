"""Tests written as asserts, split into expressions for the sandbox and conditions that are evaluated outside.

`assert sorted(f(3)) == [1, 2]` becomes the expression `f(3)` and the condition `sorted(…) == [1, 2]`. The sandbox
evaluates the expression and returns a plain value; the condition is evaluated here with a few safe functions. So
objects that equal everything, inspection of frames and a patched `exec` cannot pass a test.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

MAX_BITS, MAX_ITEMS, MAX_DIGITS, MAX_ASSERTS = 2**17, 2**17, 400, 1000
TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}
Node = TypeVar("Node", bound=ast.AST)
NUMBERS = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class SandboxStep:
    """A statement that the sandbox runs, or an expression whose value it returns."""

    code: str
    is_expression: bool = False


@dataclass(frozen=True, slots=True)
class Asserts:
    """One test."""

    steps: tuple[SandboxStep, ...]
    """In order; the values of the expressions are the answers."""
    conditions: tuple[ast.expr, ...]
    """Conditions on the answers, which are names such as `#0`."""

    def hold(self, answers: Sequence[Any]) -> bool:
        """Whether all conditions are true. Values that cannot be compared are not equal."""
        try:
            return all(bool(evaluate(condition, answers)) for condition in self.conditions)
        except Exception:  # the answers may be any objects
            return False


def read_asserts(text: str) -> Asserts:
    """Split a test; ValueError if expected values would have to enter the sandbox."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a test: {text[:80]!r} ({type(error).__name__})") from error
    reader = AssertReader(text)
    reader.block(tree.body, {})
    if not reader.conditions:
        raise ValueError(f"no assert in the test {text[:80]!r}. Write 'assert f(1) == 2'")
    return Asserts(tuple(reader.steps), tuple(reader.conditions))


# ------------------------------------------------------------------------------------------------ parsing


@dataclass(slots=True)
class AssertReader:
    """Walks the statements of a test; names of literals are replaced by them."""

    text: str
    steps: list[SandboxStep] = field(default_factory=list)
    conditions: list[ast.expr] = field(default_factory=list)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    """Functions with asserts, which are inlined where they are called: `def check(candidate)`."""
    answers: int = 0

    def block(self, body: Sequence[ast.stmt], known: dict[str, ast.expr]) -> None:
        for statement in body:
            self.statement(statement, known)

    def statement(self, statement: ast.stmt, known: dict[str, ast.expr]) -> None:
        match statement:
            case ast.Assert():
                self.assertion(filled(statement.test, known))
            case ast.FunctionDef() if has_assert(statement):
                self.functions[statement.name] = statement
            case ast.Expr(ast.Call(ast.Name(name), args, [])) if name in self.functions:
                parameters = [each.arg for each in self.functions[name].args.args]
                if len(parameters) != len(args):
                    self.refuse(f"{name} takes {len(parameters)} arguments")
                values = [filled(value, known) for value in args]
                self.block(self.functions[name].body, known | dict(zip(parameters, values, strict=True)))
            case ast.For(target, ast.List(rows) | ast.Tuple(rows), orelse=[]) if has_assert(statement):
                for row in rows:
                    self.block(statement.body, known | dict(self.unpack(target, filled(row, known))))
            case ast.Assign([ast.Name(name)], value) if is_literal(value):
                known[name] = value
            case _ if has_assert(statement):
                self.refuse(f"line {statement.lineno} is more than an assert")
            case ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case _:
                for name in assigned(statement):
                    known.pop(name, None)
                self.steps.append(SandboxStep(ast.unparse(filled(statement, known))))

    def unpack(self, target: ast.expr, row: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        match target, row:
            case ast.Name(name), _ if is_literal(row):
                yield name, row
            case ast.Tuple(targets), ast.Tuple(parts) | ast.List(parts) if len(targets) == len(parts):
                for each, part in zip(targets, parts, strict=True):
                    yield from self.unpack(each, part)
            case _:
                self.refuse("its loop is not over literals")

    def assertion(self, test: ast.expr) -> None:
        before = self.answers
        self.conditions.append(self.outside(test))
        if self.answers == before:
            self.refuse("it does not use the code")
        if len(self.conditions) > MAX_ASSERTS:
            self.refuse(f"it has more than {MAX_ASSERTS} asserts")

    def outside(self, node: ast.expr) -> ast.expr:
        """The expression, with parts that need the sandbox replaced by answers."""
        match node:
            case ast.Constant():
                return node
            case ast.Name(name) if name in TYPES:
                return node
            case ast.Attribute(ast.Name("math"), name) if name in NUMBERS:
                return node
            case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts) if not any(map(starred, parts)):
                return ast.copy_location(type(node)([self.outside(part) for part in parts]), node)
            case ast.Dict(keys, values) if None not in keys:
                return ast.Dict([self.outside(key) for key in keys if key], [self.outside(value) for value in values])
            case ast.UnaryOp(op, value):
                return ast.UnaryOp(op, self.outside(value))
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return ast.BinOp(self.outside(left), op, self.outside(right))
            case ast.BoolOp(op, values):
                return ast.BoolOp(op, [self.outside(value) for value in values])
            case ast.Compare():
                return self.comparison(node)
            case ast.Call(function, args, keywords) if can_call(function, args, keywords):
                named = [ast.keyword(each.arg, self.outside(each.value)) for each in keywords]
                return ast.Call(function, [self.outside(argument) for argument in args], named)
        return self.in_sandbox(node)

    def comparison(self, node: ast.Compare) -> ast.expr:
        """One of two compared sides must be known here, else the code could make them equal."""
        sides = [node.left, *node.comparators]
        rebuilt, from_code = [], []
        for side in sides:
            before = self.answers
            rebuilt.append(self.outside(side))
            from_code.append(self.answers > before)
        if any(a and b for a, b in itertools.pairwise(from_code)):
            self.refuse("both sides are the code's own")
        for op, side in zip(node.ops, rebuilt[1:], strict=True):
            if isinstance(op, ast.Is | ast.IsNot) and not singleton(side):
                self.refuse("`is` compares with None, True or False; write ==")
        return ast.Compare(rebuilt[0], node.ops, rebuilt[1:])

    def in_sandbox(self, node: ast.expr) -> ast.expr:
        inside = list(ast.walk(node))
        if any(isinstance(each, ast.Compare | ast.NamedExpr | ast.Await | ast.Yield) for each in inside):
            self.refuse("it compares inside a call or a loop")
        if not any(isinstance(each, ast.Name) for each in inside):
            self.refuse(f"{ast.unparse(node)[:60]} is not computed here; write its value")
        self.steps.append(SandboxStep(ast.unparse(node), is_expression=True))
        self.answers += 1
        return ast.Name(f"#{self.answers - 1}")

    def refuse(self, why: str) -> None:
        raise ValueError(
            f"the test {self.text.strip()[:80]!r} cannot be checked outside the sandbox: {why}. Write "
            "'assert f(1) == 2', or {'function': 'f', 'args': [1], 'returns': 2}"
        )


def filled(node: Node, known: Mapping[str, ast.expr]) -> Node:
    """A copy with names replaced by their literals, except names that it binds itself (in a loop or lambda)."""
    bound = assigned(node)
    free = {name: value for name, value in known.items() if name not in bound}
    return ReplaceLiterals(free).visit(copy.deepcopy(node))  # type: ignore[no-any-return]


class ReplaceLiterals(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, ast.expr]):
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        load = isinstance(node.ctx, ast.Load) and node.id in self.known
        return copy.deepcopy(self.known[node.id]) if load else node


def has_assert(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Assert) for each in ast.walk(node))


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def assigned(node: ast.AST) -> set[str]:
    inside = list(ast.walk(node))
    names = {each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    names |= {each.arg for each in inside if isinstance(each, ast.arg)}
    return names | {each.name for each in inside if isinstance(each, ast.FunctionDef | ast.ClassDef)}


def starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


def can_call(function: ast.expr, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> bool:
    """A known function without starred arguments and functions as arguments: `sorted(…, key=…)` runs in the sandbox."""
    is_plain = not any(map(starred, args)) and all(each.arg in KEYWORDS for each in keywords)
    return is_plain and function_name(function) in FUNCTIONS


def function_name(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name("math"), name):
            return f"math.{name}"
    return ""


def singleton(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value):
            return value is None or isinstance(value, bool)
        case ast.Name(name):
            return name in TYPES
    return False


# ------------------------------------------------------------------------------------------------ evaluating


def power(base: Any, exponent: Any) -> Any:
    if not isinstance(base, int | float) or not isinstance(exponent, int | float):
        raise TypeError("powers of numbers only")
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError("a power too large")
    return base**exponent


def multiply(left: Any, right: Any) -> Any:
    for count, other in ((left, right), (right, left)):
        if isinstance(count, int) and hasattr(other, "__len__") and count * len(other) > MAX_ITEMS:
            raise OverflowError("a repetition too long")
    return left * right


def modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        raise TypeError("formats are not filled here")
    return left % right


def rounded(value: Any, digits: int | None = None) -> Any:
    if digits is not None and abs(digits) > MAX_DIGITS:
        raise OverflowError("too many digits")
    return round(value, digits)


def bounded_range(*bounds: int) -> range:
    rebuilt = range(*bounds)
    if len(rebuilt) > MAX_ITEMS:
        raise OverflowError("a range too long")
    return rebuilt


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: multiply,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: modulo,
    ast.Pow: power,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, all, any, isinstance, len, max, min, sorted, str, sum, type)},
    **{name: kind for name, kind in TYPES.items() if kind is not bytes},  # `bytes(n)` allocates n bytes
    "range": bounded_range,
    "round": rounded,
    "math.isclose": math.isclose,
    "math.isnan": math.isnan,
    "math.sqrt": math.sqrt,
}
KEYWORDS = ("abs_tol", "rel_tol", "reverse", "start", "default", "ndigits")


def evaluate(node: ast.expr, answers: Sequence[Any]) -> Any:
    """The value of a condition; comparisons may raise any error."""

    def value(each: ast.expr) -> Any:
        return evaluate(each, answers)

    match node:
        case ast.Constant(constant):
            return constant
        case ast.Name(name):
            return TYPES[name] if name in TYPES else answers[int(name[1:])]
        case ast.Attribute(_, name):
            return NUMBERS[name]
        case ast.Tuple(parts):
            return tuple(map(value, parts))
        case ast.List(parts):
            return list(map(value, parts))
        case ast.Set(parts):
            return set(map(value, parts))
        case ast.Dict(keys, values):
            return {value(key): value(part) for key, part in zip(keys, values, strict=True) if key}
        case ast.UnaryOp(op, operand):
            return UNARY[type(op)](value(operand))
        case ast.BinOp(left, op, right):
            return OPERATORS[type(op)](value(left), value(right))
        case ast.BoolOp(op, values):
            return (all if isinstance(op, ast.And) else any)(bool(value(part)) for part in values)
        case ast.Compare(left, ops, sides):
            values = [value(left), *map(value, sides)]
            return all(COMPARE[type(op)](values[i], values[i + 1]) for i, op in enumerate(ops))
        case ast.Call(function, args, keywords):
            named = {str(each.arg): value(each.value) for each in keywords}
            return FUNCTIONS[function_name(function)](*map(value, args), **named)
    raise TypeError(f"{type(node).__name__} in a condition")
