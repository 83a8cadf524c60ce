"""Commands and variables of a shell script. The script is read and never run.

A condition is decided where it compares known strings or numbers. Where it depends on a command, all branches are read,
in order.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from arborl.convert.reading.bash_words import NAME, ShellExpander, ShellToken, ShellValue, tokens
from arborl.errors import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(\w+)\])?(\+?)=(.*)", re.DOTALL)
DECLARES = frozenset({"export", "readonly", "local", "declare", "typeset"})
ENDS = frozenset({";", "&", "\n", ";;"})
MOST_ROUNDS, DEEPEST, MOST_COMMANDS, MOST_STATEMENTS = 64, 20, 10_000, 20_000


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command that the script would start."""

    words: tuple[str, ...]
    line: int


@dataclass(slots=True)
class ShellScript:
    commands: list[ShellCommand] = field(default_factory=list)
    variables: dict[str, ShellValue] = field(default_factory=dict)
    statements: int = 0
    """Number of statements read, with repetitions of loops."""


def read_shell(text: str, where: str) -> ShellScript:
    script = ShellScript()
    try:
        _Walk(list(tokens(text, where)), script, where, [], {}).all()
    except RecursionError as error:
        raise ConfigError(f"{where}: cannot read quotes and brackets so deep within one another.") from error
    return script


class _Walk:
    """Goes through tokens once; what stands in a branch that is not taken is passed over."""

    def __init__(
        self,
        tokens: Sequence[ShellToken],
        script: ShellScript,
        where: str,
        arguments: list[str],
        functions: dict[str, Sequence[ShellToken]],
        depth: int = 0,
    ):
        self.tokens, self.script, self.where, self.at = tokens, script, where, 0
        self.arguments, self.functions, self.depth = arguments, functions, depth
        self.expander = ShellExpander(script.variables, arguments, where)

    def all(self) -> None:
        """From the first token to the last; what closes nothing is passed over."""
        while self.at < len(self.tokens):
            self.block((), True)
            self.at += 1

    @property
    def now(self) -> str:
        """The current token; empty at the end."""
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    # -------------------------------------------------------------------------------------------- structure

    def block(self, stops: Sequence[str], live: bool) -> None:
        """Statements, up to a word of `stops` where a statement could begin."""
        after: bool | None = None
        joined = ""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "word" and token.text in stops:
                return
            if token.kind != "word":
                if token.text in stops or (token.text in (";;", ")") and stops):
                    return
                self.at += 1
                if token.text == "(":
                    self.block((")",), live)
                    self.at += 1
                if token.kind == "op":
                    joined = token.text
                continue
            skipped = (joined == "&&" and after is False) or (joined == "||" and after is True)
            now = self.statement(live and not skipped)
            after, joined = (after if skipped else now), ""

    def statement(self, live: bool) -> bool | None:
        """One statement; whether it succeeds, where that can be known."""
        token = self.tokens[self.at]
        self.script.statements += 1
        if self.script.statements > MOST_STATEMENTS:
            raise ConfigError(f"{self.where}: line {token.line}: cannot read loops that go on for so long.")
        if self.depth > DEEPEST:
            raise ConfigError(f"{self.where}: line {token.line}: cannot read so many functions within one another.")
        rules = {
            "if": self._if, "for": self._for, "while": self._while, "until": self._while, "case": self._case,
            "{": self._group,
        }  # fmt: skip
        if token.text in rules:
            self.at += 1
            self.depth += 1
            rules[token.text](live)
            self.depth -= 1
            return None
        ahead = [one.text for one in self.tokens[self.at : self.at + 3]]
        if ahead[0] == "function" or ahead[1:] == ["(", ")"]:
            self._function(live)
            return True
        return self._simple(live)

    def _group(self, live: bool) -> None:
        self.block(("}",), live)
        self.at += 1

    def _function(self, live: bool) -> None:
        self.at += self.now == "function"
        name = self.now
        while self.at < len(self.tokens) and self.now != "{":
            self.at += 1
        start = self.at + 1
        if self.at < len(self.tokens):
            self.statement(False)
        if live:
            self.functions[name] = self.tokens[start : max(self.at - 1, start)]

    def _if(self, live: bool) -> None:
        taken = False
        word = "elif"
        while word == "elif":
            verdict = self._condition(("then",))
            self.at += 1
            self.block(("elif", "else", "fi"), live and not taken and verdict is not False)
            taken = taken or verdict is True
            word = self.now
            self.at += 1
        if word == "else":
            self.block(("fi",), live and not taken)
            self.at += 1

    def _condition(self, stops: Sequence[str]) -> bool | None:
        start = self.at
        self.block(stops, False)
        words = [token for token in self.tokens[start : self.at] if token.kind != "end" and token.text != ";"]
        return decided(words, self.expander)

    def _for(self, live: bool) -> None:
        name, items, start = self._header()
        rounds = items[:MOST_ROUNDS] if live and name else [""]
        for item in rounds or [""]:
            self.at = start
            if live and name and items:
                self.script.variables[name] = item
            self.block(("done",), live)
        self.at += 1

    def _header(self) -> tuple[str, list[str], int]:
        """What stands between `for` and `do`: a name and items; neither where it counts."""
        words: list[str] = []
        while self.at < len(self.tokens) and self.now != "do":
            if self.tokens[self.at].kind == "word":
                words.append(self.now)
            self.at += 1
        self.at += 1
        if len(words) < 2 or words[1] != "in" or not NAME.fullmatch(words[0]):
            return "", [], self.at
        return words[0], [item for word in words[2:] for item in self.expander.fields(word)], self.at

    def _while(self, live: bool) -> None:
        self._condition(("do",))
        self.at += 1
        self.block(("done",), live)
        self.at += 1

    def _case(self, live: bool) -> None:
        word = self.expander.text(self.now)
        self.at += 2  # the word, and `in`
        taken = False
        while self.at < len(self.tokens) and self.now != "esac":
            patterns: list[str] = []
            while self.at < len(self.tokens) and self.now not in (")", "esac"):
                if self.tokens[self.at].kind == "word":
                    patterns.append(self.expander.text(self.now))
                self.at += 1
            if self.now == "esac":
                break
            self.at += 1
            fits = "$" in word or any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns)
            self.block(("esac",), live and fits and not taken)
            taken = taken or (fits and "$" not in word)
            self.at += self.now == ";;"
        self.at += 1

    # -------------------------------------------------------------------------------------------- commands

    def _simple(self, live: bool) -> bool | None:
        """Words up to the end of the command: assignments, a call of a function, or a command."""
        begin = self.at
        while self.at < len(self.tokens) and self.tokens[self.at].kind == "word":
            self.at += 1
        tokens_here = list(self.tokens[begin : self.at])
        raw, line = [token.text for token in tokens_here], tokens_here[0].line
        if raw[0] in ("[[", "((") or (raw[0] == "[" and "]" not in raw):  # `&&` and `(` may stand inside
            while self.at < len(self.tokens) and tokens_here[-1].text not in ("]]", "]", "))") and self.now not in ENDS:
                tokens_here.append(self.tokens[self.at])
                self.at += 1
        if not live:
            return None
        if raw[0] in ("[[", "((", "[", "test"):
            return decided(tokens_here, self.expander)
        if raw[0] in DECLARES or all(ASSIGNMENT.fullmatch(word) for word in raw):
            for word in raw:
                if assignment := ASSIGNMENT.fullmatch(word):
                    self._assign(*assignment.groups())
            return True
        words = [one for word in raw for one in self._word(word)]
        if words and words[0] in self.functions:
            if self.depth < DEEPEST:
                body = self.functions[words[0]]
                _Walk(body, self.script, self.where, words[1:], self.functions, self.depth + 1).all()
        elif words:
            self.script.commands.append(ShellCommand(tuple(words), line))
            if len(self.script.commands) > MOST_COMMANDS:
                raise ConfigError(f"{self.where}: line {line}: cannot read more than {MOST_COMMANDS:,} commands.")
        return None

    def _word(self, raw: str) -> list[str]:
        if found := re.fullmatch(r"([^'\"$`=]*)=(\(.*\))", raw, re.DOTALL):  # brackets, where no array can be
            return [f"{found[1]}={found[2]}"]
        return self.expander.fields(raw)

    def _assign(self, name: str, index: str | None, more: str, raw: str) -> None:
        if raw.startswith("(") and raw.endswith(")"):
            words = (token.text for token in tokens(raw[1:-1], self.where) if token.kind == "word")
            value: ShellValue = [one for word in words for one in self.expander.fields(word)]
        else:
            value = self.expander.text(raw)
        before = self.script.variables.get(name)
        if index is not None:
            return
        if more and isinstance(before, list):
            value = [*before, *(value if isinstance(value, list) else [value])]
        elif more and isinstance(before, str):
            value = before + (" ".join(value) if isinstance(value, list) else value)
        self.script.variables[name] = value


def decided(tokens: Sequence[ShellToken], expander: ShellExpander) -> bool | None:
    """`[ … ]`, `[[ … ]]` and `test …`, decided where they compare known values. Unset variables are empty."""

    def known(raw: str) -> str:
        text = expander.text(raw)
        bare = re.fullmatch(r"\$\{?(\w+)\}?", text)
        return "" if bare and bare[1] not in expander.variables else text

    groups: list[list[str]] = [[]]
    signs: list[str] = []
    for token in tokens:
        if token.text in ("&&", "||", "-a", "-o"):
            signs.append("&&" if token.text in ("&&", "-a") else "||")
            groups.append([])
        elif token.text not in ("[", "]", "[[", "]]", "test", "(", ")"):
            groups[-1].append(known(token.text))
    if not tokens or tokens[0].text not in ("[", "[[", "test", "!"):
        return None
    found = _compared(groups[0])
    for sign, group in zip(signs, groups[1:], strict=True):
        both = (found, _compared(group))
        ends = sign == "||"  # the value that decides alone
        found = ends if ends in both else None if None in both else not ends
    return found


def _compared(words: list[str]) -> bool | None:
    if words and words[0] == "!":
        inner = _compared(words[1:])
        return None if inner is None else not inner
    if any("$(" in word or "`" in word for word in words):
        return None
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, how, right = words
    if how in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (how != "!=")
    orders = {"-eq": (0,), "-ne": (-1, 1), "-lt": (-1,), "-le": (-1, 0), "-gt": (1,), "-ge": (0, 1)}
    if how in orders and re.fullmatch(r"-?\d{1,18}", left) and re.fullmatch(r"-?\d{1,18}", right):
        a, b = int(left), int(right)
        return (a > b) - (a < b) in orders[how]
    return None
