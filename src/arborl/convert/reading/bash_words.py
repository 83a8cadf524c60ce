"""Tokens of a shell script, and expansion of words. Nothing is run.

A word keeps its quotes until it is expanded.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arborl.errors import ConfigError

ShellValue = str | list[str]
"""Of a variable: a text, or an array."""

MAX_LENGTH = 200_000
"""Characters that a value may grow to: variables that double one another would fill the memory."""
NAME = re.compile(r"[A-Za-z_]\w*")
ARRAY_BEGINS = re.compile(r"[A-Za-z_]\w*\+?=")
OPERATORS = ("<<<", "<<-", "&>>", "&&", "||", ";;", "<<", ">>", "&>", ">&", "<&", ";", "&", "|", "(", ")", "<", ">")
REDIRECTIONS = frozenset({"<<<", "&>>", ">>", "&>", ">&", "<&", "<", ">"})


@dataclass(frozen=True, slots=True)
class ShellToken:
    """A word, an operator, or the end of a line."""

    kind: str
    """`word`, `op` or `end`."""
    text: str
    line: int


class ShellLexer:
    """Cuts a script into tokens. Comments, redirections and here-documents are left out."""

    def __init__(self, text: str, where: str):
        self.text, self.where, self.at, self.line = text.replace("\r\n", "\n"), where, 0, 1
        self.documents: list[str] = []

    def tokens(self) -> list[ShellToken]:
        found: list[ShellToken] = []
        skip = False
        for token in self._all():
            if skip and token.kind == "word":
                skip = False
                continue
            skip = token.kind == "op" and token.text in REDIRECTIONS
            if not skip:
                found.append(token)
        return found

    def _all(self) -> Iterator[ShellToken]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\n":
                yield ShellToken("end", "\n", self.line)
                self._advance(1)
                self._skip_documents()
            elif char in " \t":
                self._advance(1)
            elif char == "\\" and (gap := re.match(r"\\[ \t]*\n", self.text[self.at : self.at + 400])):
                self._advance(gap.end())
                self._skip_comments_between()
            elif char == "#":
                self._advance(self._to("\n"))
            elif sign := next((sign for sign in OPERATORS if self.text.startswith(sign, self.at)), ""):
                yield from self._operator(sign)
            else:
                line = self.line
                word = self._word()
                if word.isdigit() and self.text[self.at : self.at + 1] in ("<", ">"):
                    continue  # which file a redirection is of
                yield ShellToken("word", word, line)

    def _operator(self, sign: str) -> Iterator[ShellToken]:
        line = self.line
        if sign in ("<", ">") and self.text.startswith("(", self.at + 1):  # a command in place of a file
            start = self.at
            self._advance(1)
            self._balanced("(", ")")
            yield ShellToken("word", self.text[start : self.at], line)
            return
        self._advance(len(sign))
        if sign in ("<<", "<<-"):
            self._advance(len(re.match(r"[ \t]*", self.text[self.at :]).group()))  # type: ignore[union-attr]
            self.documents.append(re.sub(r"[\"'\\]", "", self._word()))
            return
        yield ShellToken("op", sign, line)

    def _skip_documents(self) -> None:
        for end in self.documents:
            while self.at < len(self.text):
                line = self.text[self.at : self.at + self._to("\n")]
                self._advance(min(len(line) + 1, len(self.text) - self.at))
                if line.strip("\t") == end:
                    break
        self.documents = []

    def _skip_comments_between(self) -> None:
        """Lines that are comments in the middle of a command that goes on after them."""
        while comment := re.match(r"[ \t]*#[^\n]*(?:\n|$)", self.text[self.at :]):
            self._advance(comment.end())

    def _word(self) -> str:
        """From here to the next blank or operator outside quotes, brackets and braces; quotes included."""
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n;&|<>)":
                break
            if char == "(":
                if not ARRAY_BEGINS.fullmatch(self.text[start : self.at]):
                    break
                self._balanced("(", ")")
            elif char == "\\" and self.text.startswith("\\\n", self.at):
                break
            else:
                self._piece()
        return self.text[start : self.at]

    def _piece(self) -> None:
        char = self.text[self.at]
        if char == "\\":
            self._advance(2)
        elif char == "'":
            self._until("'")
        elif char == '"':
            self._double()
        elif char == "`":
            self._until("`")
        elif self.text.startswith("$(", self.at):
            self._advance(1)
            self._balanced("(", ")")
        elif self.text.startswith("${", self.at):
            self._advance(1)
            self._balanced("{", "}")
        else:
            self._advance(1)

    def _double(self) -> None:
        line = self.line
        self._advance(1)
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "'":
                self._advance(1)
            else:
                self._piece()
        self._close('"', line)

    def _until(self, end: str) -> None:
        line = self.line
        self._advance(1)
        self._advance(self._to(end))
        self._close(end, line)

    def _balanced(self, opens: str, closes: str) -> None:
        line, depth = self.line, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "#" and opens == "(" and self.text[self.at - 1] in " \t\n":
                self._advance(self._to("\n"))
            elif char in (opens, closes):
                depth += 1 if char == opens else -1
                self._advance(1)
                if depth == 0:
                    return
            else:
                self._piece()
        self._close(closes, line)

    def _close(self, end: str, line: int) -> None:
        if self.at >= len(self.text):
            raise ConfigError(f"{self.where}: line {line}: cannot read {end!r}, which is never closed.")
        self._advance(1)

    def _to(self, end: str) -> int:
        found = self.text.find(end, self.at)
        return (len(self.text) if found < 0 else found) - self.at

    def _advance(self, by: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + by)
        self.at += by


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

    def _pieces(self, raw: str) -> Iterator[tuple[ShellValue, bool]]:
        """Parts of a word, each with whether blanks in it divide it."""
        at = 0
        while at < len(raw):
            char = raw[at]
            if char == "'":
                end = raw.index("'", at + 1)
                yield raw[at + 1 : end], False
                at = end + 1
            elif char == '"':
                end = at + _length(raw[at:], self.where)
                yield from self._quoted(raw[at + 1 : end - 1])
                at = end
            elif char == "\\":
                yield ("" if raw[at + 1 : at + 2] == "\n" else raw[at + 1 : at + 2]), False
                at += 2
            elif char in "$`":
                end = at + _length(raw[at:], self.where)
                found = self.expanded(raw[at:end])
                ran = raw[at:end].startswith(("$(", "`"))
                yield (" ".join(found), True) if isinstance(found, list) else (found, not ran)
                at = end
            else:
                plain = re.match(r"[^'\"\\$`]+", raw[at:])
                assert plain is not None
                yield plain[0], False
                at += plain.end()

    def _quoted(self, inner: str) -> Iterator[tuple[ShellValue, bool]]:
        if not inner:
            yield "", False
        at = 0
        while at < len(inner):
            if inner[at] == "\\":
                after = inner[at + 1 : at + 2]
                yield ("" if after == "\n" else after if after in '$`"\\' else f"\\{after}"), False
                at += 2
            elif inner[at] in "$`":
                end = at + _length(inner[at:], self.where)
                yield self.expanded(inner[at:end], quoted=True), False
                at = end
            else:
                plain = re.match(r"[^\\$`]+", inner[at:])
                assert plain is not None
                yield plain[0], False
                at += plain.end()

    def expanded(self, text: str, quoted: bool = False) -> ShellValue:
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


def _length(text: str, where: str) -> int:
    """How far the quote, variable or command at the start of `text` reaches."""
    if text[0] == '"' or text.startswith(("$(", "${", "`")):
        reader = ShellLexer(text, where)
        reader._piece()
        return reader.at
    found = re.match(r"\$(\w+|[@*#?!-])?", text)
    assert found is not None
    if name := re.match(r"\$(\d)", text):
        return name.end()
    return found.end()


def _trimmed(text: str, sign: str, pattern: str) -> str:
    """`text` without the shortest (or, with the sign doubled, longest) beginning or end that fits."""
    ends = range(len(text) + 1)
    order = ends if sign in ("#", "%%") else reversed(ends)
    for at in order:
        part, rest = (text[:at], text[at:]) if sign[0] == "#" else (text[at:], text[:at])
        if sign in ("%%", "%") and fnmatch.fnmatchcase(part, pattern):
            return rest
        if sign[0] == "#" and fnmatch.fnmatchcase(part, pattern):
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
