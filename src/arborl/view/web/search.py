"""What to show of the index: filters, order, a page."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass, fields
from typing import Any

SHOWN = (
    "kind", "step", "line", "tree", "lag", "episode", "task", "source", "reward", "success", "stop", "failure", "turns",
    "calls", "sampled", "context", "branches", "version", "seconds", "preview",
)  # fmt: skip
ORDERS = {name: name for name in SHOWN if name != "preview"}
"""Columns that rows may be ordered by; nothing that a browser says becomes part of a question otherwise."""
MOST = 200
"""Rows of a page."""
FACETS = ("kind", "stop", "source", "failure")


@dataclass(frozen=True, slots=True)
class Asked:
    """Filters; what is None is not asked."""

    kind: str | None = None
    stop: str | None = None
    source: str | None = None
    failure: str | None = None
    """A cause; `any` and `none` for all and no failures."""
    task: str | None = None
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    lag_from: int | None = None
    lag_to: int | None = None
    text: str | None = None
    """Words that were said, in any order; the last may be half a word."""

    def conditions(self) -> tuple[str, list[Any]]:
        """As SQL, with the values beside it."""
        said, values = list[str](), list[Any]()
        for name in ("kind", "stop", "source", "task"):
            if (value := getattr(self, name)) is not None:
                said.append(f"{name} = ?")
                values.append(value)
        if self.failure is not None:
            all_or_none = {"any": "failure != ''", "none": "failure = ''"}.get(self.failure)
            said.append(all_or_none or "failure = ?")
            values += [] if all_or_none else [self.failure]
        for field in fields(self):
            name, _, end = field.name.partition("_")
            if end and (value := getattr(self, field.name)) is not None:
                said.append(f"{name} {'>=' if end == 'from' else '<='} ?")
                values.append(value)
        if self.text and (match := matching(self.text)):
            said.append("number IN (SELECT rowid FROM words WHERE words MATCH ?)")
            values.append(match)
        return " AND ".join(said) or "1", values


def matching(text: str) -> str:
    """A search as FTS5 takes it: every word quoted, so that none of them is an operator.

    >>> matching('go LEFT or')
    '"go" "LEFT" "or"*'
    >>> matching('*()')
    ''
    """
    words = re.findall(r"\w+", text.replace("\x00", " "))
    return " ".join(f'"{word}"' for word in words) + ("*" if words else "")


def page(rows: sqlite3.Connection, asked: Asked, order: str, first: int, count: int) -> dict[str, Any]:
    """Rows of the episodes asked for, and how many there are in all.

    Args:
        order: columns, the most important first, `-` before those that fall: `-step,reward`.
    """
    where, values = asked.conditions()
    total = rows.execute(f"SELECT count(*) FROM episodes WHERE {where}", values).fetchone()[0]
    found = rows.execute(
        f"SELECT {', '.join(SHOWN)} FROM episodes WHERE {where} ORDER BY {ordered(order)} LIMIT ? OFFSET ?",
        [*values, max(0, min(count, MOST)), max(0, min(first, 2**62))],
    )
    return {"total": total, "rows": [dict(row) for row in found]}


def ordered(order: str) -> str:
    """As SQL. What is not known comes last, whatever the direction.

    >>> ordered("-reward")
    'reward IS NULL, reward DESC, step DESC, kind DESC, line'
    """
    said = []
    for name in order.split(","):
        plain = ORDERS.get(name.removeprefix("-"))
        if plain == "step":
            said.append("step DESC" if name.startswith("-") else "step")
        elif plain:
            said += [f"{plain} IS NULL", f"{plain} DESC" if name.startswith("-") else plain]
    missing = [end for end in ("step DESC", "kind DESC", "line") if end.split()[0] not in {s.split()[0] for s in said}]
    return ", ".join([*said, *missing])


def facets(rows: sqlite3.Connection) -> dict[str, Any]:
    """What there is to choose from, with counts, and between what numbers lie."""
    counted = {
        name: [[value, count] for value, count in rows.execute(
            f"SELECT {name}, count(*) FROM episodes GROUP BY {name} ORDER BY 2 DESC LIMIT 60")]
        for name in FACETS
    }  # fmt: skip
    ends = rows.execute("SELECT min(step), max(step), min(reward), max(reward), max(lag) FROM episodes").fetchone()
    return counted | dict(zip(("step_from", "step_to", "reward_from", "reward_to", "lag_to"), ends, strict=True))
