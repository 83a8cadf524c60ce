"""Tokens of a shell script, and expansion of words. Nothing is run.

A word keeps its quotes until it is expanded.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from arborl.errors import ConfigError

ShellValue = str | list[str]
"""Of a variable: a text, or an array."""

MAX_LENGTH = 200_000
"""Characters that a value may grow to: variables that double one another would fill the memory."""
VARIABLE = re.compile(r"\$(\d|\w+|[@*#?!-])?")
NAME = re.compile(r"[A-Za-z_]\w*")
ARRAY_BEGINS = re.compile(r"[A-Za-z_]\w*\+?=")
CONTINUED = re.compile(r"\\[ \t]*\n(?:[ \t]*#[^\n]*(?:\n|$))*")
"""A line that goes on in the next one, with comments between."""
PLAIN_TEXT, QUOTED_TEXT = re.compile(r"[^'\"\\$`]+"), re.compile(r"[^\\$`]+")
OPERATORS = ("<<<", "<<-", "&>>", "&&", "||", ";;", "<<", ">>", "&>", ">&", "<&", ";", "&", "|", "(", ")", "<", ">")
REDIRECTIONS = frozenset({"<<<", "&>>", ">>", "&>", ">&", "<&", "<", ">"})


class ShellToken(NamedTuple):
    """A word, an operator, or the end of a line."""

    kind: str
    """`word`, `op` or `end`."""
    text: str
    line: int


def end_of_piece(text: str, at: int, where: str) -> int:
    """End of the quote, substitution or plain character at `at`."""
    char = text[at]
    if char == "\\":
        return at + 2
    if char in "'`":
        return _close(text, text.find(char, at + 1), at, char, where)
    if char == '"':
        end = at + 1
        while end < len(text) and text[end] != '"':
            end = end + 1 if text[end] == "'" else end_of_piece(text, end, where)
        return _close(text, end, at, char, where)
    if text.startswith(("$(", "${"), at):
        return _end_of_brackets(text, at + 1, where)
    return at + 1


def _end_of_brackets(text: str, at: int, where: str) -> int:
    opens, closes = ("(", ")") if text[at] == "(" else ("{", "}")
    end, depth = at, 0
    while end < len(text):
        if text[end] == "#" and opens == "(" and text[end - 1] in " \t\n":  # a comment
            end = _find(text, "\n", end)
        elif text[end] in (opens, closes):
            depth += 1 if text[end] == opens else -1
            end += 1
            if not depth:
                return end
        else:
            end = end_of_piece(text, end, where)
    return _close(text, end, at, closes, where)


def _close(text: str, end: int, begin: int, sign: str, where: str) -> int:
    if not 0 <= end < len(text):
        line = text.count("\n", 0, begin) + 1
        raise ConfigError(f"{where}: line {line}: cannot read {sign!r}, which is never closed.")
    return end + 1


def _find(text: str, sign: str, at: int) -> int:
    found = text.find(sign, at)
    return len(text) if found < 0 else found


def tokens(text: str, where: str) -> Iterator[ShellToken]:
    """Tokens of a script, without comments, redirections and here-documents."""
    text = text.replace("\r\n", "\n")
    documents: list[str] = []
    at, line, counted, redirected = 0, 1, 0, False
    while at < len(text):
        char = text[at]
        line, counted = line + text.count("\n", counted, at), at
        if char == "\n":
            yield ShellToken("end", "\n", line)
            redirected, at = False, at + 1
            for mark in documents:
                at = _end_of_document(text, at, mark)
            documents = []
        elif char in " \t":
            at += 1
        elif gap := CONTINUED.match(text, at):
            at = gap.end()
        elif char == "#":
            at = _find(text, "\n", at)
        elif char in "<>" and text.startswith("(", at + 1):  # a command in place of a file
            end = _end_of_brackets(text, at + 1, where)
            if not redirected:
                yield ShellToken("word", text[at:end], line)
            redirected, at = False, end
        elif sign := next((sign for sign in OPERATORS if text.startswith(sign, at)), ""):
            at += len(sign)
            if sign in ("<<", "<<-"):
                begin = at + len(text[at:]) - len(text[at:].lstrip(" \t"))
                at = _end_of_word(text, begin, where)
                documents.append(re.sub(r"[\"'\\]", "", text[begin:at]))
                continue
            redirected = sign in REDIRECTIONS
            if not redirected:
                yield ShellToken("op", sign, line)
        else:
            end = _end_of_word(text, at, where)
            word, at = text[at:end], end
            if word.isdigit() and text[at : at + 1] in ("<", ">"):
                continue  # which file a redirection is of
            if not redirected:
                yield ShellToken("word", word, line)
            redirected = False


def _end_of_document(text: str, at: int, end: str) -> int:
    while at < len(text):
        stop = _find(text, "\n", at)
        line, at = text[at:stop], min(stop + 1, len(text))
        if line.strip("\t") == end:
            break
    return at


def _end_of_word(text: str, begin: int, where: str) -> int:
    """The next blank or operator outside quotes, brackets and braces."""
    at = begin
    while at < len(text) and text[at] not in " \t\n;&|<>)" and not text.startswith("\\\n", at):
        if text[at] != "(":
            at = end_of_piece(text, at, where)
        elif ARRAY_BEGINS.fullmatch(text, begin, at):
            at = _end_of_brackets(text, at, where)
        else:
            break
    return at


# ------------------------------------------------------------------------------------------------ expansion


class ShellExpander:
    """Fills in variables. The script is read as if nothing were set in the environment; `$HOME` is `~`.

    Command substitutions (`$(date)`) and unset variables stay as text.
    """

    def __init__(self, variables: dict[str, ShellValue], arguments: list[str], where: str):
        self.variables, self.arguments, self.where = variables, arguments, where

    def fields(self, raw: str) -> list[str]:
        """A word as the words it becomes: a variable outside quotes may hold several, an array is one for each."""
        done: list[str] = []
        now: str | None = None
        for text, splits in self._pieces(raw):
            parts = text if isinstance(text, list) else divided(text) if splits else [text]
            for number, part in enumerate(parts):
                if number and now is not None:
                    done.append(now)
                    now = None
                if part or not splits:
                    now = (now or "") + part
            self._check(now or "")
        return done if now is None else [*done, now]

    def text(self, raw: str) -> str:
        """A word as one text, as on the right of an assignment."""
        found = "".join(" ".join(part) if isinstance(part, list) else part for part, _ in self._pieces(raw))
        self._check(found)
        return found

    def _check(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise ConfigError(f"{self.where}: a value is longer than {MAX_LENGTH:,} characters. Shorten the script.")

    def _pieces(self, raw: str, quoted: bool = False) -> Iterator[tuple[ShellValue, bool]]:
        """Parts of a word, each with whether blanks in it divide it."""
        at = 0
        while at < len(raw):
            char, begin = raw[at], at
            if char == "\\":
                after, at = raw[at + 1 : at + 2], at + 2
                kept = f"\\{after}" if quoted and after not in '$`"\\' else after
                yield "" if after == "\n" else kept, False
            elif char in "$`":
                at = _end_of_value(raw, at, self.where)
                found = self.expanded(raw[begin:at])
                if quoted:
                    yield found, False
                elif isinstance(found, list):
                    yield " ".join(found), True
                else:
                    yield found, not raw.startswith(("$(", "`"), begin)
            elif char == "'" and not quoted:
                at = raw.index("'", at + 1) + 1
                yield raw[begin + 1 : at - 1], False
            elif char == '"' and not quoted:
                at = _end_of_value(raw, at, self.where)
                if at - begin == 2:
                    yield "", False
                yield from self._pieces(raw[begin + 1 : at - 1], quoted=True)
            else:
                plain = (QUOTED_TEXT if quoted else PLAIN_TEXT).match(raw, at)
                assert plain is not None
                at = plain.end()
                yield plain[0], False

    def expanded(self, text: str) -> ShellValue:
        """`$X`, `${X:-y}`, `$((1 + 2))`, `$(date)`."""
        if text.startswith("$((") and text.endswith("))"):
            return self._arithmetic(text[3:-2])
        if re.fullmatch(r"\$\(\s*pwd\s*\)|`\s*pwd\s*`", text):
            return "."
        if text.startswith(("$(", "`")) or text == "$":
            return text
        inner = text[2:-1] if text.startswith("${") else text[1:]
        if inner in ("@", "*"):
            return list(self.arguments)
        if inner == "#":
            return str(len(self.arguments))
        found = re.match(r"(\w+)(?:\[([^\]]*)\])?", inner)
        if found is None:
            return text
        value, rest = self._value(found[1], found[2]), inner[found.end() :]
        if not rest:
            return f"${found[1]}" if value is None else value
        return self._changed(value, rest, text)

    def _value(self, name: str, index: str | None) -> ShellValue | None:
        if name.isdigit():
            number = int(name)
            return self.arguments[number - 1] if 0 < number <= len(self.arguments) else None
        if name in ("HOME", "PWD") and name not in self.variables:
            return "~" if name == "HOME" else "."
        value = self.variables.get(name)
        if isinstance(value, str) or value is None or index in ("@", "*"):
            return value
        number = int(index) if index and index.lstrip("-").isdigit() else 0
        return value[number] if -len(value) <= number < len(value) else ""

    def _changed(self, value: ShellValue | None, rest: str, text: str) -> ShellValue:
        """`:-default`, `%suffix`, `//old/new` and their like; others stay as they are."""
        whole = " ".join(value) if isinstance(value, list) else value or ""
        if sign := re.match(r"(:?)([-=+])", rest):
            missing = value is None or (bool(sign[1]) and not whole)
            other = self.text(rest[sign.end() :])
            return ("" if missing else other) if sign[2] == "+" else other if missing else value or ""
        if rest.startswith(":?"):
            return text if value is None else value
        if value is None:
            return text
        if cut := re.match(r"(##?|%%?)", rest):
            return _trimmed(whole, cut[1], self.text(rest[cut.end() :]))
        if rest.startswith("/"):
            old, _, new = rest.lstrip("/").partition("/")
            return whole.replace(self.text(old), self.text(new), -1 if rest.startswith("//") else 1) if old else whole
        return {",,": whole.lower, "^^": whole.upper}.get(rest, lambda: text)()

    def _arithmetic(self, text: str) -> str:
        filled = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        try:
            return str(_computed(ast.parse(filled.strip(), mode="eval").body, self.variables))
        except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError, MemoryError):
            return f"$(({text}))"


def divided(text: str) -> list[str]:
    """A text cut at its blanks, except for those inside `$(…)`, which would have been run before."""
    kept = re.sub(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", lambda found: re.sub(r"\s", "\0", found[0]), text)
    return [part.replace("\0", " ") for part in re.split(r"\s+", kept)]


def _end_of_value(text: str, at: int, where: str) -> int:
    """End of the quote, variable or command at `at`."""
    if text[at] in '"`' or text.startswith(("$(", "${"), at):
        return end_of_piece(text, at, where)
    found = VARIABLE.match(text, at)
    assert found is not None
    return found.end()


def _trimmed(text: str, sign: str, pattern: str) -> str:
    """`text` without the shortest (or, with the sign doubled, longest) beginning or end that fits."""
    ends = range(len(text) + 1)
    for at in ends if sign in ("#", "%%") else reversed(ends):
        part, rest = (text[:at], text[at:]) if sign[0] == "#" else (text[at:], text[:at])
        if fnmatch.fnmatchcase(part, pattern):
            return rest
    return text


BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: lambda a, b: int(a / b) if abs(a) < 2**50 else a // b, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _computed(node: ast.AST, variables: Mapping[str, Any]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(variables[node.id])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        found = BINARY[type(node.op)](_computed(node.left, variables), _computed(node.right, variables))
        if abs(found) > 2**63:
            raise ValueError("larger than a shell counts")
        return found
    raise ValueError("not whole numbers added, multiplied or divided")
