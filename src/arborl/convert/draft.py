"""The configuration under construction, and the outcome of every key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arborl.convert.conversion_report import KeyReport, short, table
from arborl.errors import ConfigError

SECRET = re.compile(r"(?:api|access|secret|private)_?(?:key|token)$|(?:^|[._])(?:token|password|passwd|secret)$", re.I)


@dataclass(slots=True)
class Draft:
    """A configuration under construction. "Theirs" is the other system, "ours" is Arbor."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Our settings, by dotted path."""
    source: dict[str, Any] = field(default_factory=dict)
    """Their settings, by dotted key."""
    lines: list[KeyReport] = field(default_factory=list)
    """Outcomes, in the order of processing."""
    problems: list[str] = field(default_factory=list)
    """Errors: environments, agents, tools and rewards without counterpart."""
    uses: dict[str, str] = field(default_factory=dict)
    """Counterparts of their names, from `--use`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their defaults, by dotted key."""
    notes: list[str] = field(default_factory=list)
    """Lines about devices, below the report."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of files that belong beside the configuration, by name."""

    @property
    def mapped(self) -> list[KeyReport]:
        """Outcomes of keys with a counterpart."""
        return [line for line in self.lines if line.kind in ("mapped", "changed")]

    @property
    def unmapped(self) -> list[KeyReport]:
        """Outcomes of keys without a counterpart."""
        return [line for line in self.lines if line.kind in ("lost", "idle")]

    def set(self, key: str, value: Any, path: str, ours: Any, why: str = "") -> None:
        """Their `key` is our `path`; `why` states a difference in meaning."""
        self.settings[path] = ours
        self.lines.append(KeyReport("changed" if why else "mapped", key, shown(key, value), path, ours, why))

    def default(self, key: str, value: Any, path: str, ours: Any, why: str = "") -> None:
        """Their files do not set `key`: write their default, unless `path` is already set."""
        if path not in self.settings:
            self.settings[path] = ours
            self.lines.append(KeyReport("changed" if why else "mapped", key, value, path, ours, why, explicit=False))

    def say(self, key: str, otherwise: Any, path: str, ours: Any, why: str = "") -> None:
        """`set` if their files set `key`; else `default`, with their default (`otherwise`)."""
        if key in self.source:
            self.set(key, self.source[key], path, ours, why)
        else:
            self.default(key, otherwise, path, ours, why)

    def put(self, key: str, otherwise: Any, path: str, change: Callable[[Any], Any] | None = None) -> Any:
        """Their `key`, or their default (`otherwise`), is our `path`. Returns their value."""
        value = self.source.get(key, otherwise)
        try:
            ours = change(value) if change else value
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}={value!r}: must be a number.") from error
        self.say(key, otherwise, path, ours)
        return value

    def lose(self, key: str, value: Any, why: str) -> None:
        """Their `key` has no counterpart: the run works without it, and the report says what is lost."""
        self.lines.append(KeyReport("lost", key, shown(key, value), why=why))

    def skip(self, key: str, value: Any, why: str) -> None:
        """Their `key` needs no counterpart: it is off, a definition, or about speed or placement."""
        self.lines.append(KeyReport("idle", key, shown(key, value), why=why))

    def skip_rest(self, keys: Iterable[str], why: str) -> None:
        """Skip those of `keys` that their files set and that have no outcome yet."""
        for key in keys:
            if key in self.source and key not in self.accounted():
                self.skip(key, self.source[key], why)

    def refuse(self, key: str, value: Any, why: str) -> None:
        """The conversion fails; `why` states what to do."""
        self.lose(key, value, why)
        given = "" if value is None and key not in self.source else f"={short(shown(key, value))}"
        self.problems.append(f"{key}{given}: {why}")

    def undo(self, path: str, why: str) -> None:
        """Remove our `path`, which has no effect."""
        self.settings.pop(path, None)
        kept = [line for line in self.lines if line.path != path or line.explicit]
        self.lines = [KeyReport("idle", line.key, line.value, why=why) if line.path == path else line for line in kept]

    def move(self, path: str, to: str) -> None:
        """Rename our `path` to `to`."""
        if path in self.settings:
            self.settings[to] = self.settings.pop(path)
        self.lines = [dataclasses.replace(line, path=to) if line.path == path else line for line in self.lines]

    def accounted(self) -> frozenset[str]:
        """Their keys that have an outcome."""
        return frozenset(line.key for line in self.lines)

    def known(self, key: str) -> Any:
        """Their value of `key`: from their files, or their default."""
        return self.source.get(key, self.defaults.get(key))

    def number_or(self, key: str, otherwise: float = 0) -> Any:
        """Their value if it is a number; the rule of its own key refuses others."""
        found = self.known(key)
        return found if isinstance(found, int | float) and not isinstance(found, bool) else otherwise

    def whole(self, key: str, otherwise: int, least: int | None = None) -> int:
        """Their `key` as a whole number, `least` or more; ConfigError otherwise."""
        value = round(self.number(key, otherwise))
        if least is not None and value < least:
            raise ConfigError(f"{key}={value}: must be a whole number >= {least}.")
        return value

    def number(self, key: str, otherwise: float) -> float:
        """Their `key` as a number; ConfigError otherwise."""
        value = self.source.get(key)
        return as_number(key, otherwise if value is None else value)

    def below(self, prefix: str) -> dict[str, Any]:
        """Their settings below `prefix`, without it."""
        return {key.removeprefix(prefix): value for key, value in self.source.items() if key.startswith(prefix)}

    def tree(self) -> dict[str, Any]:
        """The configuration, nested."""
        out: dict[str, Any] = {}
        for path, value in self.settings.items():
            *above, last = path.split(".")
            node = out
            for part in above:
                node = node.setdefault(part, {})
            node[last] = value
        return out

    def report(self, width: int = 140) -> str:
        """The outcomes as a table, and the devices."""
        devices = "".join(f"\n  {note}" for note in self.notes)
        return table(self.lines, width) + (f"\nDevices and machine{devices}" if devices else "")


def shown(key: str, value: Any) -> Any:
    """The value, unless it is a secret."""
    return "***" if SECRET.search(key) and value not in (None, "") else value


def as_number(key: str, value: Any) -> float:
    """The value of their `key` as a number; ConfigError otherwise."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        nowhere = " It refers to a key that is not there." if "${" in str(value) else ""
        raise ConfigError(f"{key}={value!r}: must be a number.{nowhere}") from error


def names(value: Any) -> list[str]:
    """A list of names, also as a shell writes it: `[a, b]`, `['a','b']`."""
    parts: Iterable[Any] = value if isinstance(value, list | tuple) else str(value or "").strip("[]() ").split(",")
    return [name for part in parts if (name := str(part).strip(" '\""))]


def paths(value: Any) -> list[str]:
    """Files of a key that names one or several."""
    return [str(one) for one in value] if isinstance(value, list) else names(value)


def one_or_all(items: list[str]) -> str | list[str]:
    """A list of one item as that item."""
    return items[0] if len(items) == 1 else items
