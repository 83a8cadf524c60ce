"""What to show of the index: filters, order, a page."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

SHOWN = (
    "kind", "step", "line", "tree", "lag", "source", "reward", "success", "stop", "failure", "turns", "calls",
    "sampled", "context", "branches", "version", "seconds", "episode", "task", "preview",
)  # fmt: skip
ORDERS = {name for name in SHOWN if name not in ("preview", "step", "line")}
"""Columns that rows may be ordered by, beside their place; nothing else that a browser says becomes part of a
question."""
ROWS = f"SELECT number, {', '.join(SHOWN)} FROM episodes JOIN names USING (number)"
MOST = 200
"""Rows of a page."""
FACETS = ("kind", "stop", "source", "failure")


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
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
        """As SQL, with the values beside it; all but the text. The plus says: walk in order, rather than sort."""
        said, values = list[str](), list[Any]()
        for name in ("kind", "stop", "source"):
            if (value := getattr(self, name)) is not None:
                said.append(f"{name} = ?")
                values.append(value)
        if self.task is not None:
            said.append("+number IN (SELECT number FROM names WHERE task = ?)")
            values.append(self.task)
        if self.failure is not None:
            all_or_none = {"any": "failure != ''", "none": "failure = ''"}.get(self.failure)
            said.append(all_or_none or "failure = ?")
            values += [] if all_or_none else [self.failure]
        for field in fields(self):
            name, _, end = field.name.partition("_")
            if end and (value := getattr(self, field.name)) is not None:
                said.append(f"{name} {'>=' if end == 'from' else '<='} ?")
                values.append(value)
        return " AND ".join(said) or "1", values


def matching(text: str) -> str:
    """A search as FTS5 takes it: every word quoted, so that none of them is an operator.

    >>> matching('go LEFT or')
    '"go" "LEFT" "or"*'
    >>> matching('*()')
    ''
    """
    words = re.findall(r"[^\W_]+", text)
    return " ".join(f'"{word}"' for word in words) + ("*" if words else "")


def page(rows: sqlite3.Connection, asked: EpisodeFilter, order: str, first: int, count: int) -> dict[str, Any]:
    """Rows of the episodes asked for, and how many there are in all.

    Args:
        order: columns, the most important first, `-` before those that fall: `-step,reward`.
    """
    where, values = asked.conditions()
    first, count = max(0, min(first, 2**40)), max(0, min(count, MOST))
    named = order.removeprefix("-").startswith(("episode", "task"))
    of = "episodes JOIN names USING (number)" if named else "episodes"
    if match := matching(asked.text or ""):
        find(rows, match)
        where += " AND +number IN found"
    counted = (
        "SELECT coalesce(sum(lines - bad), 0) FROM files"
        if where == "1"
        else f"SELECT count(*) FROM episodes WHERE {where}"
    )
    total = rows.execute(counted, values).fetchone()[0]
    wanted = f"SELECT number FROM {of} WHERE {where} ORDER BY {ordered(order)} LIMIT ? OFFSET ?"
    numbers = [number for (number,) in rows.execute(wanted, (*values, count, first))]
    marks = ", ".join("?" * len(numbers))
    by_number = {row["number"]: dict(row) for row in rows.execute(f"{ROWS} WHERE number IN ({marks})", numbers)}
    return {"total": total, "rows": [by_number[number] for number in numbers if number in by_number]}


def find(rows: sqlite3.Connection, match: str) -> None:
    """Put the episodes in which this was said into a table of this connection's own, `found`.

    The words are looked up once: asked within a question, SQLite would look them up for the count and for the page.
    """
    rows.execute("PRAGMA temp_store = MEMORY")
    rows.execute("CREATE TEMP TABLE IF NOT EXISTS found (number INTEGER PRIMARY KEY)")
    rows.execute("DELETE FROM found")
    with suppress(sqlite3.OperationalError):  # a word that is none to SQLite
        rows.execute("INSERT INTO found SELECT rowid FROM words WHERE words MATCH ?", (match,))


def ordered(order: str) -> str:
    """As SQL. What is not known comes last, whatever the direction; of equals the newest first.

    >>> ordered("-reward")
    'reward DESC, step DESC, kind DESC, line'
    >>> ordered("step")
    'step, kind, line DESC'
    """
    said: list[str] = []
    for name in order.split(","):
        plain = name.removeprefix("-")
        if plain == "step":
            return ", ".join(
                [*said, *(("step DESC", "kind DESC", "line") if name != plain else ("step", "kind", "line DESC"))]
            )
        if plain in ORDERS:
            said += [f"{plain} DESC"] if name != plain else [f"{plain} IS NULL", plain]
    return ", ".join([*said, "step DESC", "kind DESC", "line"])


def facets(rows: sqlite3.Connection) -> dict[str, Any]:
    """What there is to choose from, with counts, and between what numbers lie."""
    counted: dict[str, Counter[str]] = {name: Counter() for name in FACETS}
    for *values, count in rows.execute(
        f"SELECT {', '.join(FACETS)}, count(*) FROM episodes GROUP BY {', '.join(FACETS)}"
    ):
        for name, value in zip(FACETS, values, strict=True):
            counted[name][value] += count
    ends = rows.execute("SELECT min(reward), max(reward), max(lag) FROM episodes").fetchone()
    steps = rows.execute("SELECT min(step), max(step) FROM files").fetchone()
    names = ("step_from", "step_to", "reward_from", "reward_to", "lag_to")
    most = {name: [list(one) for one in found.most_common(60)] for name, found in counted.items()}
    return most | dict(zip(names, (*steps, *ends), strict=True))
