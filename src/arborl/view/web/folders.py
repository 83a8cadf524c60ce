"""Run folders below a folder: which there are, how they stand, how their configurations differ."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

DEEP = 4
"""Folders below the first that are looked into."""
SIGNS = ("config.yaml", "metrics.jsonl")
"""Files that make a folder a run."""
APART = {"output_dir", "name"}
"""Settings that differ between any two runs and say nothing."""
LOOKED = 1.0
"""Seconds for which a listing is good."""


class Runs:
    """The runs in a folder, by their path below it; `.` is the folder itself, where it is one.

    A name that a browser sends is looked up here and never made into a path.
    """

    def __init__(self, root: Path):
        self.root = root
        self._found: dict[str, Path] = {}
        self._at = float("-inf")
        self._lock = threading.Lock()

    def all(self) -> dict[str, Path]:
        """Every run, in order of name."""
        with self._lock:
            if time.monotonic() - self._at > LOOKED:
                found = {str(path.relative_to(self.root)): path for path in _below(self.root, DEEP)}
                self._found, self._at = dict(sorted(found.items())), time.monotonic()
            return self._found

    def __getitem__(self, name: str) -> Path:
        """The run of that name; KeyError where there is none."""
        return self.all()[name]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if any((folder / sign).is_file() for sign in SIGNS):
        yield folder
        return
    with suppress(OSError):
        for entry in os.scandir(folder) if depth else ():
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _below(Path(entry.path), depth - 1)


def standing(folder: Path) -> dict[str, Any]:
    """What a list of runs says of one: its state, how far it is, what was measured before and after."""
    summary, config = read_summary(folder), read_config(folder)
    files = [folder / name for name in ("metrics.jsonl", "run.log", "config.yaml")]
    changed = max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
    return {
        "title": str(config.get("name") or folder.resolve().name),
        "state": _state(folder, summary),
        "changed": changed,
        "steps": look_up(config, "trainer.steps"),
        "model": look_up(config, "model.name"),
        "algorithm": look_up(config, "algorithm.name"),
        "environment": look_up(config, "env.name"),
        "seed": config.get("seed"),
        "before": _numbers(summary.get("before")),
        "after": _numbers(summary.get("after")),
        "seconds": summary.get("train_seconds"),
        "failures": [_cause(one) for one in summary.get("failures") or () if isinstance(one, Mapping)],
    }


def _state(folder: Path, summary: Mapping[str, Any]) -> str:
    if _held(folder / ".lock"):
        return "running"
    if summary:
        return "stopped" if summary.get("stopped") else "finished"
    return "interrupted" if (folder / "metrics.jsonl").exists() else "empty"


def _held(lock: Path) -> bool:
    """Whether a process trains there: it holds a lock, which the system's table of locks shows without touching it."""
    with suppress(OSError, ValueError):
        inode = str(lock.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            if any(word.rpartition(":")[2] == inode and word.count(":") == 2 for word in line.split()):
                return True
    return False


def read_config(folder: Path) -> dict[str, Any]:
    """The run's configuration; empty where there is none that can be read."""
    path = folder / "config.yaml"
    try:
        return _config(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(512)
def _config(path: Path, changed: int) -> dict[str, Any]:
    """Reading YAML takes longer than all else that a list of runs says."""
    with suppress(ValueError, yaml.YAMLError, RecursionError):
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        found = yaml.load(path.read_text(encoding="utf-8"), loader)
        return found if isinstance(found, dict) else {}
    return {}


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's summary; empty where there is none yet."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """`model.name` in a nested mapping. A part may be given as its bare name."""
    found: Any = config
    for key in path.split("."):
        if isinstance(found, str) and key == "name":
            return found
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def flat(config: Any, before: str = "") -> dict[str, Any]:
    """Dotted keys.

    >>> flat({"a": {"b": 1, "c": []}, "d": "x"})
    {'a.b': 1, 'a.c': [], 'd': 'x'}
    """
    if not isinstance(config, Mapping) or not config:
        return {before: config} if before else {}
    return {
        name: value
        for key, inner in config.items()
        for name, value in flat(inner, f"{before}.{key}" if before else str(key)).items()
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Settings that differ, with each run's value (None where it has none); and those that are the same in all."""
    rows = [flat(config) for config in configs]
    names = dict.fromkeys(name for row in rows for name in row)
    differ, same = {}, {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(value != values[0] for value in values):
            if name not in APART:
                differ[name] = values
        else:
            same[name] = values[0]
    return differ, same


def pictures(folder: Path) -> dict[str, Path]:
    """Moving pictures of the run, by their path below its folder."""
    found = [path for path in (folder / "frames").rglob("*.gif") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): path for path in sorted(found)}


def _cause(failure: Mapping[str, Any]) -> dict[str, Any]:
    return {name: failure.get(name) for name in ("where", "kind", "message", "count")}


def _numbers(measured: Any) -> dict[str, float]:
    if not isinstance(measured, Mapping):
        return {}
    return {str(name): value for name, value in measured.items() if isinstance(value, int | float)}
