"""What a run is called by those who follow it, kept in its folder: a resumed run goes on under the same name."""

from __future__ import annotations

import json
from pathlib import Path

FILE = "trackers.json"


def known_id(folder: Path, tracker: str) -> str | None:
    """The run's id with this tracker, if it has one."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8")).get(tracker)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def keep_id(folder: Path, tracker: str, given: str) -> None:
    """Write it down beside those of others."""
    path = folder / FILE
    try:
        all_of_them = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        all_of_them = {}
    fresh = path.with_name(f".{path.name}.{tracker}.tmp")
    fresh.write_text(json.dumps({**all_of_them, tracker: given}, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
