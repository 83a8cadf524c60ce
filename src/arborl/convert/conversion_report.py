"""Outcomes of a conversion as a table and as JSON; the configuration as YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

Kind = Literal["mapped", "changed", "lost", "idle"]
"""Same meaning; different meaning; no counterpart; no counterpart needed."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """Outcome of one key."""

    kind: Kind
    key: str
    """Theirs."""
    value: Any
    """Theirs; secrets are masked."""
    path: str = ""
    """Our key, where there is one."""
    ours: Any = None
    """Its value."""
    why: str = ""
    """The difference, or why there is no counterpart."""
    explicit: bool = True
    """Whether their files set it; otherwise it is their default."""

    @property
    def what(self) -> str:
        """`learner.lr=5e-07`; or the reason."""
        return f"{self.path}={self.ours}" if self.kind in ("mapped", "changed") else self.why


TITLES = {
    "lost": "Lost: no counterpart; the run works without it",
    "changed": "Changed in meaning",
    "mapped": "Mapped",
    "idle": "Needs no counterpart, with the reason",
}
"""In the order of importance."""
WORDS = {"mapped": "mapped", "changed": "changed in meaning", "lost": "lost", "idle": "without a counterpart"}
UNESCAPED = re.compile(r"(?<!\\)(\\*)\$\{(?!oc\.env:\w+\})")
"""References that a converted file must escape: all but environment variables."""


def rows(lines: Sequence[KeyReport]) -> list[dict[str, Any]]:
    """The outcomes as objects for JSON."""
    names = {"path": "our_key", "ours": "our_value", "why": "reason"}
    objects = [{names.get(name, name): value for name, value in asdict(line).items()} for line in lines]
    return [row | {name: row[name] or None for name in ("our_key", "reason")} for row in objects]


def table(lines: Sequence[KeyReport], width: int = 140) -> str:
    """Outcomes by kind; keys with the same reason share a row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = StringIO()
    console = Console(file=out, width=max(width, 80), no_color=True, highlight=False)
    for kind, title in TITLES.items():
        of_kind = [line for line in lines if line.kind == kind]
        if not of_kind:
            continue
        grid = Table(title=f"{title} ({len(of_kind)})", title_justify="left", box=None, pad_edge=False, expand=False)
        for name in ("theirs", "ours", "difference or reason") if kind != "idle" else ("theirs", "why"):
            grid.add_column(name, overflow="fold")
        for cells in _cells(of_kind, kind):
            grid.add_row(*map(Text, cells))  # brackets are not markup
        console.print(grid)
        console.print()
    console.print(", ".join(f"{sum(line.kind == kind for line in lines)} {word}" for kind, word in WORDS.items()))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _cells(lines: Sequence[KeyReport], kind: str) -> list[tuple[str, ...]]:
    if kind == "idle":
        reasons = dict.fromkeys(line.why for line in lines)
        return [(", ".join(_folded([line.key for line in lines if line.why == why])), why) for why in reasons]
    found: dict[tuple[str, str], list[KeyReport]] = {}
    for line in lines:
        ours = f"{line.path}={short(line.ours, 40)}" if line.path else ""
        found.setdefault((ours, line.why), []).append(line)
    return [("\n".join(dict.fromkeys(map(_theirs, several))), ours, why) for (ours, why), several in found.items()]


def _theirs(line: KeyReport) -> str:
    return f"{line.key}={short(line.value, 40)}" + ("" if line.explicit else " (their default)")


def _folded(keys: Sequence[str]) -> list[str]:
    """Keys, grouped as `section.{a, b}` or `section.*`."""
    sections: dict[str, list[str]] = {}
    for key in dict.fromkeys(keys):
        head, _, rest = key.partition(".")
        sections.setdefault(head, []).append(rest)
    out = []
    for head, inside in sections.items():
        if len(inside) == 1:
            out.append(f"{head}.{inside[0]}".rstrip("."))
        elif any("." in one for one in inside) and len(inside) > 3:
            out.append(f"{head}.* ({len(inside)})")
        else:
            out.append(f"{head}.{{{', '.join(inside)}}}")
    return out


def as_yaml(tree: Any) -> str:
    """The configuration as a file that `arborl train` reads: `${…}` is escaped, except for environment variables."""
    return str(yaml.safe_dump(_escaped(tree), sort_keys=False, allow_unicode=True, width=120))


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return UNESCAPED.sub(r"\1\1\\${", value)
    return value


def short(value: Any, most: int = 60) -> str:
    """A value on one line."""
    text = " ".join(str(value).split()) if isinstance(value, str) else str(value)
    return text if len(text) <= most else text[: most - 3] + "..."
