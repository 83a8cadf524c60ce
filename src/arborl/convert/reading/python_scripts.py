"""Python scripts as text: values of constant expressions. Nothing of a script is imported or run.

`PythonReader` evaluates literals, arithmetic, dictionaries, dataclasses and calls of the script's own functions. A call
of a library is a `UnevaluatedCall`; everything else is a `RunTimeValue`.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from arborl.errors import ConfigError

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_,
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "max": max, "min": min, "round": round,
    "abs": abs, "sum": sum, "dict": dict, "list": list, "tuple": tuple, "range": range, "sorted": sorted,
    "pathlib.Path": PurePosixPath, "os.path.join": lambda *parts: str(PurePosixPath(*parts)),
    "os.path.basename": lambda path: PurePosixPath(path).name,
}  # fmt: skip
METHODS: dict[type, frozenset[str]] = {
    str: frozenset({"split", "rsplit", "replace", "lower", "upper", "strip", "format", "join", "startswith", "endswith",
                    "removeprefix", "removesuffix", "title"}),
    dict: frozenset({"get", "update", "items", "keys", "values", "copy", "pop", "setdefault"}),
    list: frozenset({"append", "extend", "insert", "copy"}),
    PurePosixPath: frozenset({"joinpath", "with_suffix", "as_posix"}),
}  # fmt: skip
MUTATING = ("append", "extend", "insert", "update", "pop", "setdefault")
LARGEST = 100_000
"""Largest length of a text or list, and largest exponent, that are evaluated."""
LONGEST_LOOP = 100
LONGEST_OPERAND = 2_000
"""Longest text whose methods are called."""
LONGEST_TEXT = 20
"""Lines of an expression that is shown."""
MOST_STATEMENTS = 2_000
"""Statements after which no function is called any more."""
WIDE = re.compile(r"\d{4,}")
"""Format specifications of a great width."""
DEEPEST = 30


class RunTimeValue(str):
    """The text of an expression whose value is only known when the script runs."""


@dataclass(frozen=True, slots=True, eq=False)
class ImportedName:
    """A name of another module."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True, eq=False)
class ScriptDefinition:
    """A function or class of the script."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    frame: ScriptScope

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True, eq=False)
class UnevaluatedCall:
    """A call that is not made: an object of a library, or of a class of the script."""

    path: str
    node: ast.expr
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, and attributes that the script sets later."""
    on: Any = None
    """The object whose method it is."""
    of: ScriptDefinition | None = None
    """The script's own class."""
    frame: ScriptScope | None = None
    """Where it is written."""

    @property
    def name(self) -> str:
        """`trl.GRPOConfig` -> `GRPOConfig`."""
        return self.path.rpartition(".")[2]

    def __str__(self) -> str:
        return ast.unparse(self.node)


@dataclass(frozen=True, slots=True, eq=False)
class CallItem:
    """An item of a call's result: `dataset["train"]`, or one of several results."""

    of: Any
    key: Any

    def __str__(self) -> str:
        return f"{self.of}[{self.key!r}]"


@dataclass(slots=True, eq=False)
class ScriptScope:
    """Names of the module or of one call of a function."""

    names: dict[str, Any]
    body: Sequence[ast.stmt]
    parent: ScriptScope | None = None
    shared: set[str] = field(default_factory=set)
    """Names that it declares as `global`."""
    has_unknown_return: bool = False

    def find(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        return self.parent.find(name) if self.parent is not None else _builtin(name)


def _builtin(name: str) -> Any:
    return ImportedName(name) if hasattr(builtins, name) else RunTimeValue(name)


@dataclass(frozen=True, slots=True)
class ReturnedValue:
    value: Any


class PythonReader:
    """Evaluates the statements of a script as far as they are constant."""

    library: Mapping[str, Mapping[str, Any]] = {}
    """Attributes of objects of libraries, by class, with their defaults."""
    star_imports: Mapping[str, Sequence[str]] = {}
    """Names that `from MODULE import *` brings, by module."""

    def __init__(self, tree: ast.Module, path: Path):
        self.tree, self.path = tree, path
        self.module = self.frame = ScriptScope({"__name__": "__main__", "__file__": str(path)}, tree.body)
        self.uncertain = 0
        """Above 0 in statements that may not be run."""
        self.loops = 0
        """Above 0 in loops of several rounds."""
        self.guarded = 0
        """Above 0 in blocks of `try`."""
        self.depth = self.statements = 0

    def made(self, call: UnevaluatedCall) -> Any:
        """The value of a call of a library, or of a class of the script."""
        return call

    def method(self, call: UnevaluatedCall) -> Any:
        """The value of a call of a method of such an object."""
        return call

    def made_certain(self, value: Any) -> Any:
        """The value if a name keeps it although its assignment may not be run; else None."""

    def stopped(self, node: ast.Raise) -> None:
        """The script raises an exception here, whatever is only known when it runs."""

    # -------------------------------------------------------------------------------------------- statements

    def run(self, statements: Sequence[ast.stmt]) -> ReturnedValue | None:
        for statement in statements:
            self.statements += 1
            if self.statements > 20 * MOST_STATEMENTS:
                raise ConfigError(
                    f"{self.path}: its loops have too many statements to be read. Write the training alone."
                )
            method = getattr(self, f"_{type(statement).__name__.lower()}", None)
            returned = method(statement) if method is not None else None
            if returned is not None:
                return returned  # type: ignore[no-any-return]
        return None

    def _functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.frame.names[node.name] = ScriptDefinition(node.name, node, self.frame)

    _asyncfunctiondef = _classdef = _functiondef

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.frame.names[name] = ImportedName(alias.name if alias.asname else name)

    def _importfrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name == "*":
                found = {name: ImportedName(f"{module}.{name}") for name in self.star_imports.get(module, ())}
                self.frame.names = found | self.frame.names
            else:
                self.frame.names[alias.asname or alias.name] = ImportedName(f"{module}.{alias.name}")

    def _assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._bind(target, value, node.value)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, self.value(node.value), node.value)

    def _augassign(self, node: ast.AugAssign) -> None:
        whole = ast.BinOp(left=_loaded(node.target), op=node.op, right=node.value)
        self._bind(node.target, self.value(ast.copy_location(whole, node)), node.value)

    def _bind(self, target: ast.expr, value: Any, node: ast.expr) -> None:
        if self.uncertain and not isinstance(self.made_certain(value), UnevaluatedCall):
            value = run_time_value(node)
        if isinstance(target, ast.Name):
            (self.module if target.id in self.frame.shared else self.frame).names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = self._parts(value, len(target.elts), node)
            for one, part in zip(target.elts, parts, strict=True):
                self._bind(one, part, node)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            if isinstance(owner, UnevaluatedCall):
                owner.keywords[target.attr] = value
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value), self.value(target.slice)
            if isinstance(owner, dict) and not _is_unknown(key):
                owner[key] = value

    def _parts(self, value: Any, count: int, node: ast.expr) -> list[Any]:
        if isinstance(value, list | tuple):
            rest = isinstance(node, ast.Call) and len(value) == count - 1  # of `return_remaining_strings`
            value = [*value, []] if rest else value
            if len(value) == count:
                return list(value)
        if isinstance(value, UnevaluatedCall | CallItem):
            return [CallItem(value, number) for number in range(count)]
        return [run_time_value(node)] * count

    def _global(self, node: ast.Global) -> None:
        self.frame.shared |= set(node.names)

    def _expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _return(self, node: ast.Return) -> ReturnedValue | None:
        if self.uncertain:
            self.frame.has_unknown_return = True
            return None
        return ReturnedValue(None if node.value is None else self.value(node.value))

    def _if(self, node: ast.If) -> ReturnedValue | None:
        test = self.value(node.test)
        if not _is_unknown(test):
            return self.run(node.body if test else node.orelse)
        self._maybe(node.body, node.orelse)
        return None

    def _maybe(self, *blocks: Sequence[ast.stmt]) -> None:
        """Run statements that may not be run."""
        self.uncertain += 1
        try:
            for block in blocks:
                self.run(block)
        finally:
            self.uncertain -= 1

    def _with(self, node: ast.With) -> ReturnedValue | None:
        for item in node.items:
            if item.optional_vars is not None:
                self._bind(item.optional_vars, self.value(item.context_expr), item.context_expr)
        return self.run(node.body)

    def _try(self, node: ast.Try) -> ReturnedValue | None:
        self.guarded += 1
        try:
            return self.run(node.body) or self.run(node.finalbody)
        finally:
            self.guarded -= 1

    def _for(self, node: ast.For) -> ReturnedValue | None:
        items = self.value(node.iter)
        if not isinstance(items, list | tuple | range | dict) or len(items) > LONGEST_LOOP:
            self._bind(node.target, RunTimeValue(ast.unparse(node.target)), node.iter)
            self._while(node)
            return None
        self.loops += (several := len(items) > 1)
        try:
            for item in list(items):
                self._bind(node.target, item, node.iter)
                if (returned := self.run(node.body)) is not None:
                    return returned
        finally:
            self.loops -= several
        return None

    def _while(self, node: ast.While | ast.For) -> None:
        self.loops += 1
        try:
            self._maybe(node.body)
        finally:
            self.loops -= 1

    def _match(self, node: ast.Match) -> None:
        self._maybe(*(case.body for case in node.cases))

    def _raise(self, node: ast.Raise) -> None:
        raised = self.value(node.exc) if node.exc is not None else None
        if not (self.uncertain or self.guarded or str(raised).startswith("SystemExit")):
            self.stopped(node)

    # -------------------------------------------------------------------------------------------- expressions

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; a `RunTimeValue` if it is not constant."""
        method, found = getattr(self, f"_value_{type(node).__name__.lower()}", None), NotImplemented
        if method is not None:
            with suppress(TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
                found = method(node)
        is_large = isinstance(found, str | list | tuple | dict) and len(found) > LARGEST
        return run_time_value(node) if found is NotImplemented or is_large else found

    def _value_constant(self, node: ast.Constant) -> Any:
        return node.value

    def _value_name(self, node: ast.Name) -> Any:
        return self.frame.find(node.id)

    def _value_lambda(self, node: ast.Lambda) -> Any:
        return ScriptDefinition("lambda", node, self.frame)

    def _value_list(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        out: list[Any] = []
        for one in node.elts:
            value = self.value(one.value if isinstance(one, ast.Starred) else one)
            if isinstance(one, ast.Starred) and not isinstance(value, list | tuple):
                return NotImplemented
            out += value if isinstance(one, ast.Starred) else [value]
        return tuple(out) if isinstance(node, ast.Tuple) else out

    _value_tuple = _value_set = _value_list

    def _value_dict(self, node: ast.Dict) -> Any:
        out: dict[Any, Any] = {}
        for key, inner in zip(node.keys, node.values, strict=True):
            value = self.value(inner)
            if key is not None:
                out[self.value(key)] = value
            elif isinstance(value, dict):
                out |= value
            else:
                return NotImplemented
        return out

    def _value_joinedstr(self, node: ast.JoinedStr) -> Any:
        texts = []
        for part in node.values:
            value = self.value(part.value if isinstance(part, ast.FormattedValue) else part)
            if not isinstance(value, str | int | float | PurePosixPath) or isinstance(value, RunTimeValue):
                return NotImplemented
            spec = self.value(part.format_spec) if isinstance(part, ast.FormattedValue) and part.format_spec else ""
            if WIDE.search(spec):
                return NotImplemented
            texts.append(format(value, spec))
        return "".join(texts)

    def _value_binop(self, node: ast.BinOp | ast.UnaryOp | ast.Compare) -> Any:
        first: ast.AST = node.ops[0] if isinstance(node, ast.Compare) else node.op
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        else:
            operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        values, compute = [self.value(one) for one in operands], OPERATORS.get(type(first))
        if (
            compute is None
            or len(values) > 2
            or any(_is_unknown(one) or isinstance(one, ImportedName) for one in values)
        ):
            return NotImplemented
        sizes = (
            [len(one) if isinstance(one, str | list | tuple) else abs(one) for one in values] if _grows(first) else []
        )
        is_number = all(isinstance(one, int | float) for one in values) and isinstance(first, ast.Mult)
        return NotImplemented if sizes and not is_number and math.prod(sizes) > LARGEST else compute(*values)

    _value_unaryop = _value_compare = _value_binop

    def _value_boolop(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for one in node.values:
            value = self.value(one)
            if _is_unknown(value):
                return NotImplemented
            if bool(value) == isinstance(node.op, ast.Or):
                return value
        return value

    def _value_ifexp(self, node: ast.IfExp) -> Any:
        test = self.value(node.test)
        return NotImplemented if _is_unknown(test) else self.value(node.body if test else node.orelse)

    def _value_subscript(self, node: ast.Subscript) -> Any:
        owner = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            parts = [node.slice.lower, node.slice.upper, node.slice.step]
            bounds = [None if one is None else self.value(one) for one in parts]
            return NotImplemented if any(map(_is_unknown, [owner, *bounds])) else owner[slice(*bounds)]
        key = self.value(node.slice)
        if isinstance(owner, UnevaluatedCall | CallItem):
            return CallItem(owner, key)
        return NotImplemented if _is_unknown(key) or _is_unknown(owner) else owner[key]

    def _value_attribute(self, node: ast.Attribute) -> Any:
        return self._attribute(self.value(node.value), node.attr)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, ImportedName):
            return ImportedName(f"{owner.path}.{name}")
        if isinstance(owner, UnevaluatedCall):
            if name in owner.keywords:
                return owner.keywords[name]
            known = self.library.get(owner.name, {}) if owner.of is None else self.fields(owner.of)
            return known.get(name, NotImplemented)
        if isinstance(owner, ScriptDefinition) and isinstance(owner.node, ast.ClassDef):
            return self.fields(owner).get(name, NotImplemented)
        if isinstance(owner, PurePosixPath) and name in ("parent", "name", "stem", "suffix"):
            return getattr(owner, name)
        return NotImplemented

    def fields(self, of: ScriptDefinition) -> dict[str, Any]:
        """Fields of a dataclass of the script, and of its bases, with their defaults."""
        if not isinstance(of.node, ast.ClassDef):
            return {}
        out: dict[str, Any] = {}
        for base in map(self.value, of.node.bases):
            out |= self.library.get(base.path.rpartition(".")[2], {}) if isinstance(base, ImportedName) else {}
            out |= self.fields(base) if isinstance(base, ScriptDefinition) and base is not of else {}
        for one in of.node.body:
            targets = (
                [one.target] if isinstance(one, ast.AnnAssign) else one.targets if isinstance(one, ast.Assign) else ()
            )
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(one, ast.AnnAssign | ast.Assign):
                    out[target.id] = self._field_default(one.value)
        return out

    def _field_default(self, node: ast.expr | None) -> Any:
        value = self.value(node) if node is not None else RunTimeValue("a required argument")
        if not (isinstance(value, UnevaluatedCall) and value.name == "field"):
            return value
        factory = value.keywords.get("default_factory")
        if isinstance(factory, ImportedName):
            return {"list": [], "dict": {}}.get(factory.path, RunTimeValue(str(value)))
        if isinstance(factory, ScriptDefinition) and isinstance(factory.node, ast.Lambda):
            return self.value(factory.node.body)
        return value.keywords.get("default", RunTimeValue(str(value)))

    # -------------------------------------------------------------------------------------------- calls

    def _value_call(self, node: ast.Call) -> Any:
        args, keywords = self._given(node)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if not isinstance(owner, ImportedName):
                return self._method(owner, node.func.attr, args, keywords, node)
        function = self.value(node.func)
        if isinstance(function, ScriptDefinition):
            return self.apply(function, args, keywords, node)
        if not isinstance(function, ImportedName):
            return NotImplemented
        path, given = function.path, [*args, *keywords.values()]
        if path in FUNCTIONS:
            is_long = any(isinstance(one, range) and len(one) > LARGEST for one in given)
            is_constant = path in ("dict", "list", "tuple", "len") or not any(map(has_run_time_value, given))
            return FUNCTIONS[path](*args, **keywords) if is_constant and not is_long else NotImplemented
        if path == "importlib.import_module" and len(args) == 1 and not _is_unknown(args[0]):
            return ImportedName(args[0])
        if path == "getattr" and len(args) > 1 and not _is_unknown(args[1]):
            return self._attribute(args[0], args[1])
        return self.made(UnevaluatedCall(path, node, args, keywords, frame=self.frame))

    def _value_await(self, node: ast.Await) -> Any:
        return self.value(node.value)

    def _given(self, node: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        for one in node.args:
            value = self.value(one.value if isinstance(one, ast.Starred) else one)
            is_list = isinstance(one, ast.Starred) and isinstance(value, list | tuple)
            args += value if is_list else [value]
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords |= value
            else:
                keywords[f"**{ast.unparse(keyword.value)}"] = RunTimeValue(ast.unparse(keyword.value))
        return tuple(args), keywords

    def _method(self, owner: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any], node: ast.Call) -> Any:
        if isinstance(owner, UnevaluatedCall | CallItem):
            return self.method(UnevaluatedCall(name, node, args, keywords, on=owner, frame=self.frame))
        names = next((names for kind, names in METHODS.items() if isinstance(owner, kind)), frozenset())
        if name not in names or isinstance(owner, RunTimeValue):
            return NotImplemented
        given = [*args, *keywords.values()]
        is_long = any(isinstance(one, str) and len(one) > LONGEST_OPERAND for one in (owner, *given))
        if isinstance(owner, str) and (is_long or any(map(has_run_time_value, given)) or WIDE.search(owner)):
            return NotImplemented
        if self.uncertain and isinstance(owner, list | dict) and name in MUTATING:
            text = run_time_value(node)
            owner.append(text) if isinstance(owner, list) else owner.update({f"**{text}": text})
            return NotImplemented
        found = getattr(owner, name)(*args, **keywords)
        return list(found) if name in ("items", "keys", "values") else found

    def apply(self, function: ScriptDefinition, args: tuple[Any, ...], keywords: dict[str, Any], node: ast.AST) -> Any:
        """Call a function of the script, or make an object of its class."""
        if isinstance(function.node, ast.ClassDef):
            known = dict(zip(self.fields(function), args, strict=False)) | keywords
            return self.made(UnevaluatedCall(function.name, node, args, known, of=function, frame=self.frame))  # type: ignore[arg-type]
        is_costly = self.depth >= DEEPEST or self.statements > MOST_STATEMENTS
        if isinstance(function.node, ast.Lambda) or is_costly or _is_generator(function.node):
            return NotImplemented
        before, parameters = self.frame, function.node.args
        frame = ScriptScope({}, function.node.body, parent=function.frame)
        names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
        self.frame = function.frame
        defaults = dict(zip(reversed(names), map(self.value, reversed(parameters.defaults)), strict=False))
        for one, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if default is not None:
                defaults[one.arg] = self.value(default)
        everything = [*names, *(one.arg for one in parameters.kwonlyargs)]
        frame.names = {name: defaults.get(name, RunTimeValue(name)) for name in everything}
        frame.names |= dict(zip(names, args, strict=False)) | {k: v for k, v in keywords.items() if k in everything}
        self.frame, self.depth = frame, self.depth + 1
        try:
            returned = self.run(function.node.body)
        finally:
            self.frame, self.depth = before, self.depth - 1
        if frame.has_unknown_return:
            return NotImplemented
        return returned.value if returned is not None else None


def run_time_value(node: ast.expr) -> RunTimeValue:
    """The text of an expression; of a long one its line."""
    is_long = (node.end_lineno or 0) - node.lineno > LONGEST_TEXT or (node.end_col_offset or 0) > LONGEST_OPERAND
    return RunTimeValue(f"what line {node.lineno} makes" if is_long else ast.unparse(node))


def _is_unknown(value: Any) -> bool:
    return isinstance(value, RunTimeValue | UnevaluatedCall | CallItem | ScriptDefinition) or value is NotImplemented


def has_run_time_value(value: Any) -> bool:
    """Whether a part of the value is only known when the script runs."""
    if isinstance(value, Mapping):
        return any(map(has_run_time_value, (*value, *value.values())))
    return any(map(has_run_time_value, value)) if isinstance(value, list | tuple) else _is_unknown(value)


def _is_generator(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(node))


def _grows(operation: ast.AST) -> bool:
    return isinstance(operation, ast.Pow | ast.Mult)


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body
