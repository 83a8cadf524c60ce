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
OPENERS = frozenset({"if", "for", "while", "until", "case", "function", "{"})
MOST_ROUNDS, DEEPEST, MOST_COMMANDS, MOST_STATEMENTS = 64, 20, 10_000, 20_000


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command that the script would start."""

    words: tuple[str, ...]
    line: int


@dataclass(slots=True)
class ShellScript:
    """Commands and variables of a script."""

    commands: list[ShellCommand] = field(default_factory=list)
    variables: dict[str, ShellValue] = field(default_factory=dict)
    statements: int = 0
    """Number of statements read, with repetitions of loops."""


def read_shell(text: str, where: str) -> ShellScript:
    """The commands and variables of a script."""
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
        rule = {"if": self._if, "for": self._for, "while": self._while, "until": self._while, "case": self._case}
        if token.text in rule:
            self.at += 1
            self.depth += 1
            rule[token.text](live)
            self.depth -= 1
            return None
        if token.text == "{":
            self.at += 1
            self.depth += 1
            self.block(("}",), live)
            self.depth -= 1
            self.at += 1
            return None
        if self._is_function():
            self._function(live)
            return True
        return self._simple(live)

    def _is_function(self) -> bool:
        ahead = [token.text for token in self.tokens[self.at : self.at + 3]]
        return ahead[:1] == ["function"] or ahead[1:] == ["(", ")"]

    def _function(self, live: bool) -> None:
        self.at += self.tokens[self.at].text == "function"
        name = self.tokens[self.at].text if self.at < len(self.tokens) else ""
        while self.at < len(self.tokens) and self.tokens[self.at].text != "{":
            self.at += 1
        start = self.at + 1
        if self.at < len(self.tokens):
            self.statement(False)
        if live:
            self.functions[name] = self.tokens[start : max(self.at - 1, start)]

    def _if(self, live: bool) -> None:
        taken = False
        while True:
            verdict = self._condition(("then",))
            self.at += 1
            self.block(("elif", "else", "fi"), live and not taken and verdict is not False)
            taken = taken or verdict is True
            word = self.tokens[self.at].text if self.at < len(self.tokens) else "fi"
            self.at += 1
            if word == "else":
                self.block(("fi",), live and not taken)
                self.at += 1
            if word != "elif":
                return

    def _condition(self, stops: Sequence[str]) -> bool | None:
        start = self.at
        self.block(stops, False)
        words = [token for token in self.tokens[start : self.at] if token.kind != "end" and token.text != ";"]
        return ShellCondition(words, self.expander).decided()

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
        while self.at < len(self.tokens) and self.tokens[self.at].text != "do":
            if self.tokens[self.at].kind == "word":
                words.append(self.tokens[self.at].text)
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
        word = self.expander.text(self.tokens[self.at].text) if self.at < len(self.tokens) else ""
        self.at += 2  # the word, and `in`
        taken = False
        while self.at < len(self.tokens) and self.tokens[self.at].text != "esac":
            patterns: list[str] = []
            while self.at < len(self.tokens) and self.tokens[self.at].text not in (")", "esac"):
                if self.tokens[self.at].kind == "word":
                    patterns.append(self.expander.text(self.tokens[self.at].text))
                self.at += 1
            if self.at < len(self.tokens) and self.tokens[self.at].text == "esac":
                break
            self.at += 1
            fits = "$" in word or any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns)
            self.block(("esac",), live and fits and not taken)
            taken = taken or (fits and "$" not in word)
            if self.at < len(self.tokens) and self.tokens[self.at].text == ";;":
                self.at += 1
        self.at += 1

    # -------------------------------------------------------------------------------------------- commands

    def _simple(self, live: bool) -> bool | None:
        """Words up to the end of the command: assignments, a call of a function, or a command."""
        line, raw = self.tokens[self.at].line, []
        tokens = []
        while self.at < len(self.tokens) and self.tokens[self.at].kind == "word":
            raw.append(self.tokens[self.at].text)
            tokens.append(self.tokens[self.at])
            self.at += 1
        if raw[0] in ("[[", "((") or (raw[0] == "[" and "]" not in raw):  # `&&` and `(` may stand inside
            return self._long_test(tokens, live)
        if not live:
            return None
        if raw[0] in ("[", "test"):
            return ShellCondition(tokens, self.expander).decided()
        if raw[0] in DECLARES or all(ASSIGNMENT.fullmatch(word) for word in raw):
            for word in raw:
                if assignment := ASSIGNMENT.fullmatch(word):
                    self._assign(*assignment.groups())
            return True
        words = [one for word in raw for one in self._word(word)]
        if words and words[0] in self.functions:
            self._call(words)
        elif words:
            self.script.commands.append(ShellCommand(tuple(words), line))
            if len(self.script.commands) > MOST_COMMANDS:
                raise ConfigError(f"{self.where}: line {line}: cannot read more than {MOST_COMMANDS:,} commands.")
        return None

    def _long_test(self, tokens: list[ShellToken], live: bool) -> bool | None:
        while self.at < len(self.tokens) and tokens[-1].text not in ("]]", "]", "))"):
            if self.tokens[self.at].text in ENDS:
                break
            tokens.append(self.tokens[self.at])
            self.at += 1
        return ShellCondition(tokens, self.expander).decided() if live else None

    def _word(self, raw: str) -> list[str]:
        if found := re.fullmatch(r"([^'\"$`=]*)=(\(.*\))", raw, re.DOTALL):  # brackets, where no array can be
            return [f"{found[1]}={found[2]}"]
        return self.expander.fields(raw)

    def _assign(self, name: str, index: str | None, more: str, raw: str) -> None:
        variables = self.script.variables
        value: ShellValue = (
            self._array(raw[1:-1]) if raw.startswith("(") and raw.endswith(")") else self.expander.text(raw)
        )
        before = variables.get(name)
        if index is not None:
            return
        if more and before is not None:
            if isinstance(before, list):
                value = [*before, *(value if isinstance(value, list) else [value])]
            else:
                value = before + (" ".join(value) if isinstance(value, list) else value)
        variables[name] = value

    def _array(self, inner: str) -> list[str]:
        words = (token.text for token in tokens(inner, self.where) if token.kind == "word")
        return [one for word in words for one in self.expander.fields(word)]

    def _call(self, words: list[str]) -> None:
        if self.depth >= DEEPEST:
            return
        body = self.functions[words[0]]
        _Walk(body, self.script, self.where, words[1:], self.functions, self.depth + 1).all()


class ShellCondition:
    """`[ … ]`, `[[ … ]]` and `test …`, decided where they compare known values. Unset variables are empty."""

    def __init__(self, tokens: Sequence[ShellToken], expander: ShellExpander):
        self.tokens, self.expander = tokens, expander

    def decided(self) -> bool | None:
        groups: list[list[str]] = [[]]
        signs: list[str] = []
        for token in self.tokens:
            if token.text in ("&&", "||", "-a", "-o"):
                signs.append("&&" if token.text in ("&&", "-a") else "||")
                groups.append([])
            elif token.text not in ("[", "]", "[[", "]]", "test", "(", ")"):
                groups[-1].append(self._known(token.text))
        if not self.tokens or self.tokens[0].text not in ("[", "[[", "test", "!"):
            return None
        found = self._one(groups[0])
        for sign, group in zip(signs, groups[1:], strict=True):
            other = self._one(group)
            if sign == "&&":
                found = False if found is False or other is False else (True if found and other else None)
            else:
                found = True if found or other else (False if found is False and other is False else None)
        return found

    def _known(self, raw: str) -> str:
        text = self.expander.text(raw)
        bare = re.fullmatch(r"\$\{?(\w+)\}?", text)
        return "" if bare and bare[1] not in self.expander.variables else text

    def _one(self, words: list[str]) -> bool | None:
        if words and words[0] == "!":
            inner = self._one(words[1:])
            return None if inner is None else not inner
        if any("$(" in word or "`" in word for word in words):
            return None
        if len(words) == 1:
            return bool(words[0])
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return bool(words[1]) == (words[0] == "-n")
        if len(words) == 3:
            return _compared(*words)
        return None


def _compared(left: str, how: str, right: str) -> bool | None:
    if how in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if how == "!=":
        return not fnmatch.fnmatchcase(left, right)
    orders = {"-eq": (0,), "-ne": (-1, 1), "-lt": (-1,), "-le": (-1, 0), "-gt": (1,), "-ge": (0, 1)}
    if how in orders and re.fullmatch(r"-?\d{1,18}", left) and re.fullmatch(r"-?\d{1,18}", right):
        a, b = int(left), int(right)
        return (a > b) - (a < b) in orders[how]
    return None
