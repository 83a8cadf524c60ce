"""One run: facts, settings with their defaults, findings of the doctor, log and replays."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from arborl.config.config_base import changed_settings, flatten, to_plain
from arborl.config.run_config import RunConfig
from arborl.config.secrets import mask_secrets
from arborl.diagnosis import Finding, examine_run
from arborl.errors import printable
from arborl.track.folder_files import MAX_LINES_FILE, Unreadable, open_regular, read_json
from arborl.view.web import folders
from arborl.view.web.run_list import run_row

FINDINGS_SECONDS = 10.0
"""A running run is examined at most this often."""
MAX_LOG_BYTES = 2**22
"""Bytes at the end of the log that are searched."""
MAX_LOG_LINES = 400
MAX_LOG_LINE = 2000
"""Characters of a line."""
MAX_STEP = 10**12
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def run_facts(name: str, folder: Path) -> dict[str, Any]:
    """State, execution, progress, tags and evaluation of a run."""
    return run_row(name, folder) | {
        "execution": folders.read_execution(folder),
        "path": str(folder.resolve()),
        "accounting": folders.read_accounting(folder),
        "agent": _short(folders.look_up(folders.read_config(folder), "agent.name")),
        "engine": _short(folders.look_up(folders.read_config(folder), "engine.name")),
    }


def _short(value: Any) -> str | None:
    return value[: folders.MAX_TEXT] if isinstance(value, str) and value else None


@lru_cache(1)
def default_settings() -> dict[str, Any]:
    """Every setting with its default, by dotted key."""
    return flatten(mask_secrets(to_plain(RunConfig())))


def run_settings(folder: Path) -> dict[str, Any]:
    """All settings of a run, and those that differ from the defaults, as `arborl train --print --diff` lists them. A
    setting that the file of an older version does not have counts as its default."""
    defaults, settings = default_settings(), mask_secrets(folders.flat_config(folder))
    differ = {key: [before, now] for key, before, now in changed_settings(defaults, defaults | settings)}
    return {"settings": settings, "differ": {key: pair for key, pair in differ.items() if key in settings}}


@dataclass(frozen=True, slots=True)
class _Examined:
    state: str
    stamp: list[int]
    at: float
    findings: list[Finding]


class FindingsCache:
    """Findings of `arborl doctor`. They are computed again when the run has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, _Examined] = {}
        self._lock = threading.Lock()

    def of(self, folder: Path) -> list[Finding]:
        state = folders.run_state(folder)["state"]
        stamp = folders.stamps_of(folder, ("metrics.jsonl", "summary.json", "config.yaml", "execution.json"))
        with self._lock:  # one examination at a time: it reads episodes
            known = self._known.get(folder)
            if known is not None and known.state == state:
                is_recent = state == "running" and time.monotonic() - known.at < FINDINGS_SECONDS
                if known.stamp == stamp or is_recent:
                    return known.findings
            found = _examine(folder)
            self._known[folder] = _Examined(state, stamp, time.monotonic(), found)
            return found


def _examine(folder: Path) -> list[Finding]:
    try:
        return examine_run(folder)
    except Exception as error:  # a damaged folder
        detail = printable(f"the run could not be examined: {type(error).__name__}: {error}"[:400])
        return [Finding("doctor", "fail", detail, "Check the files that the message names.")]


def log_tail(folder: Path, find: str = "", level: str = "") -> dict[str, Any]:
    """The last lines of `run.log` that contain `find` and have at least the level."""
    try:
        with open_regular(folder / "run.log", MAX_LINES_FILE) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return {"lines": [], "total": 0, "bytes": 0, "searched": 0}
    lines = text.split("\n")
    lines = lines[1:] if size > MAX_LOG_BYTES else lines
    entries = [line for line in _entries(lines) if _has_level(line, level) and find.casefold() in line.casefold()]
    shown = [line[:MAX_LOG_LINE] for line in entries[-MAX_LOG_LINES:]]
    return {"lines": shown, "total": len(entries), "bytes": size, "searched": min(size, MAX_LOG_BYTES)}


def _entries(lines: list[str]) -> list[str]:
    """Entries of the log: a line without time and level belongs to the line before it."""
    entries: list[str] = []
    for line in lines:
        if entries and line and _level_of(line) is None:
            entries[-1] += f"\n{line}" if len(entries[-1]) < MAX_LOG_LINE else ""
        elif line:
            entries.append(line)
    return entries


def _level_of(line: str) -> str | None:
    words = line.split(None, 2)
    return words[1] if len(words) > 1 and words[1] in LEVELS else None


def _has_level(line: str, level: str) -> bool:
    if level not in LEVELS:
        return True
    return LEVELS.index(_level_of(line) or "INFO") >= LEVELS.index(level)


def replays(folder: Path) -> list[dict[str, Any]]:
    """GIFs of the run, with kind, step and id of their episodes where these are known."""
    try:
        named = read_json(folder / "frames" / "episodes.json")
    except (OSError, Unreadable):
        named = {}
    named = named if isinstance(named, dict) else {}
    found = []
    for name in folders.pictures(folder):
        about = named.get(name.removeprefix("frames/"))
        match about:
            case [str(kind), int(step), str(episode)] if 0 <= step < MAX_STEP:
                found.append({"name": name, "kind": kind, "step": step, "episode": episode[: folders.MAX_TEXT]})
            case _:
                found.append({"name": name})
    return found
