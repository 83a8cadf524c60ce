"""Calls as a Python list with literal keyword arguments. Nothing is evaluated."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Iterator
from typing import Any

from arborl.chat.formats.json_calls import dumps, shorten, unique_pairs
from arborl.chat.formats.tool_parser import ToolCallParser
from arborl.types import ToolCall

SHAPE = '[TOOL(NAME="VALUE")]'
START = re.compile(r"\[\s*[^\W\d][\w.]*\s*\(")
LONGEST, DEEPEST = 50_000, 60
WORDS = {"true": True, "false": False, "null": None}  # JSON constants, which models also write


class PythonicParser(ToolCallParser):
    """`[add(a=1, b=2), now()]`, between other text.

    Example:
        PythonicParser().parse("[add(a=1)]")      # (ToolCall("call_0", "add", {"a": 1}),)
    """

    tokens = ("<|python_start|>", "<|python_end|>")
    opens = ("<|python_start|>", "[")

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        at = 0
        while found := START.search(text, at):
            end = _closing(text, found.start())
            if end is None:  # the rest is inside the list
                calls.append(ToolCall("", "", error=f"the list of tool calls is not closed. Write {SHAPE}"))
                break
            calls += _read(text[found.start() : end])
            at = end
        return tuple(ToolCall(f"call_{i}", call.name, call.arguments, call.error) for i, call in enumerate(calls))

    def format(self, *calls: ToolCall) -> str:
        return f"[{', '.join(map(_write, calls))}]" if calls else ""


def _closing(text: str, start: int) -> int | None:
    """Index behind the bracket that closes the one at `start`; brackets in strings do not count."""
    depth, quote, at = 0, "", start
    while at < min(len(text), start + LONGEST):
        here = text[at]
        if quote:
            at += here == "\\"
            quote = "" if here == quote else quote
        elif here in "'\"":
            quote = here
        elif here in "([{":
            depth += 1
            if depth > DEEPEST:
                return None
        elif here in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return None


def _read(source: str) -> Iterator[ToolCall]:
    """The calls of one list. An invalid call affects no other, unless the list is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        yield ToolCall("", "", error=f"{shorten(source)} is not a list of calls ({why}). Write {SHAPE}")
        return
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        name = _name(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name:
            yield ToolCall("", "", error=f"{shorten(ast.unparse(node))} is not a call. Write {SHAPE}")
            continue
        try:
            yield ToolCall("", name, _arguments(node))
        except ValueError as error:
            yield ToolCall("", name, error=f"{error}. Write {SHAPE.replace('TOOL', name)}")


def _name(node: ast.expr) -> str:
    """The dotted name of a node; empty if it is none."""
    if isinstance(node, ast.Attribute):
        before = _name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _arguments(node: ast.Call) -> dict[str, Any]:
    if node.args:
        raise ValueError(f"{shorten(ast.unparse(node.args[0]))} has no name: every argument is written NAME=VALUE")
    read: list[tuple[str, Any]] = []
    for word in node.keywords:
        value = _literal(word.value)
        if word.arg is not None:
            read.append((word.arg, value))
        elif isinstance(value, dict):  # **{"not a name": 1}
            read += value.items()
        else:
            raise ValueError("only an object can follow **")
    return unique_pairs(read)


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON could hold."""
    match node:
        case ast.Constant(value=str(text)):
            try:
                text.encode()
            except UnicodeError:
                raise ValueError("a string holds half of a surrogate pair") from None
            return text
        case ast.Constant(value=bool() | None | int() as value):
            return value
        case ast.Constant(value=float(value)) if abs(value) != float("inf"):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -_number(value) if isinstance(sign, ast.USub) else _number(value)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return unique_pairs([(_key(key), _literal(value)) for key, value in zip(keys, values, strict=True)])
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
    raise ValueError(f"{shorten(ast.unparse(node))} is not a number, a string, a list or an object")


def _number(value: float) -> float:
    if isinstance(value, bool) or abs(value) == float("inf"):
        raise ValueError(f"{value} is not a number to be signed")
    return value


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of an object are strings")


def _write(call: ToolCall) -> str:
    parts = call.name.split(".")
    if not all(map(_is_name, parts)):
        raise ValueError(f"{call.name!r} is not a name in Python")
    dumps(call.arguments)  # refuses what JSON does not have
    named = [f"{key}={value!r}" for key, value in call.arguments.items() if _is_name(key)]
    rest = {key: value for key, value in call.arguments.items() if not _is_name(key)}
    return f"{call.name}({', '.join([*named, *([f'**{rest!r}'] if rest else [])])})"


def _is_name(text: str) -> bool:
    # Python normalises other spellings of letters, which would not round-trip.
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)
