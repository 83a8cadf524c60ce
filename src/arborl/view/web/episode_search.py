"""Queries of the episode index: filters, order, pages."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

COLUMNS_SHOWN = (
    "kind", "step", "line", "tree", "lag", "source", "reward", "success", "stop", "failure", "turns", "calls",
    "sampled", "context", "branches", "version", "seconds", "episode", "task", "preview",
)  # fmt: skip
ORDERS = {name for name in COLUMNS_SHOWN if name not in ("preview", "step", "line")}
"""Columns that rows may be ordered by; no other text of a browser becomes part of a query."""
ROWS = f"SELECT number, {', '.join(COLUMNS_SHOWN)} FROM episodes JOIN names USING (number)"
MAX_ROWS = 200
"""Rows of a page."""
FACETS = ("kind", "stop", "source", "failure")


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Filters; None means no filter."""

    kind: str | None = None
    stop: str | None = None
    source: str | None = None
    failure: str | None = None
    """A cause, `any` or `none`."""
    task: str | None = None
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    lag_from: int | None = None
    lag_to: int | None = None
    text: str | None = None
    """Words in any order; the last may be a prefix."""

    def conditions(self) -> tuple[str, list[Any]]:
        """SQL conditions and their values, without the text. The plus keeps SQLite from sorting."""
        conditions, values = list[str](), list[Any]()
        for name in ("kind", "stop", "source"):
            if (value := getattr(self, name)) is not None:
                conditions.append(f"{name} = ?")
                values.append(value)
        if self.task is not None:
            conditions.append("+number IN (SELECT number FROM names WHERE task = ?)")
            values.append(self.task)
        if self.failure is not None:
            all_or_none = {"any": "failure != ''", "none": "failure = ''"}.get(self.failure)
            conditions.append(all_or_none or "failure = ?")
            values += [] if all_or_none else [self.failure]
        for field in fields(self):
            name, _, end = field.name.partition("_")
            if end and (value := getattr(self, field.name)) is not None:
                conditions.append(f"{name} {'>=' if end == 'from' else '<='} ?")
                values.append(value)
        return " AND ".join(conditions) or "1", values


def matching(text: str) -> str:
    """An FTS5 query: every word quoted, so that none is an operator.

    >>> matching('go LEFT or')
    '"go" "LEFT" "or"*'
    >>> matching('*()')
    ''
    """
    words = re.findall(r"[^\W_]+", text)
    return " ".join(f'"{word}"' for word in words) + ("*" if words else "")


def page(rows: sqlite3.Connection, filters: EpisodeFilter, order: str, first: int, count: int) -> dict[str, Any]:
    """One page of the matching episodes, and their total number; `order` is `-step,reward` (`-`: descending)."""
    where, values = filters.conditions()
    first, count = max(0, min(first, 2**40)), max(0, min(count, MAX_ROWS))
    named = order.removeprefix("-").startswith(("episode", "task"))
    of = "episodes JOIN names USING (number)" if named else "episodes"
    if match := matching(filters.text or ""):
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
    """Put the matching episodes into the temporary table `found`, so that count and page search once."""
    rows.execute("PRAGMA temp_store = MEMORY")
    rows.execute("CREATE TEMP TABLE IF NOT EXISTS found (number INTEGER PRIMARY KEY)")
    rows.execute("DELETE FROM found")
    with suppress(sqlite3.OperationalError):  # no word for SQLite
        rows.execute("INSERT INTO found SELECT rowid FROM words WHERE words MATCH ?", (match,))


def ordered(order: str) -> str:
    """The ORDER BY clause. Missing values come last; ties are ordered newest first.

    >>> ordered("-reward")
    'reward DESC, step DESC, kind DESC, line'
    >>> ordered("step")
    'step, kind, line DESC'
    """
    terms: list[str] = []
    for name in order.split(","):
        plain = name.removeprefix("-")
        if plain == "step":
            return ", ".join(
                [*terms, *(("step DESC", "kind DESC", "line") if name != plain else ("step", "kind", "line DESC"))]
            )
        if plain in ORDERS:
            terms += [f"{plain} DESC"] if name != plain else [f"{plain} IS NULL", plain]
    return ", ".join([*terms, "step DESC", "kind DESC", "line"])


def facets(rows: sqlite3.Connection) -> dict[str, Any]:
    """Values of the filters with counts, and ranges of the numbers."""
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
