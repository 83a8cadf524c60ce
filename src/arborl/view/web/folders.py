"""Run folders below a folder: which there are, how they stand, how their configurations differ."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.track.folder_files import entries_of, is_regular, read_json, read_yaml

DEEP = 4
"""Folders below the first that are looked into."""
SIGNS = ("config.yaml", "metrics.jsonl")
"""Files that make a folder a run."""
APART = {"output_dir", "name"}
"""Settings that differ between any two runs and say nothing."""
LOOKED = 1.0
"""Seconds for which a listing is good."""
MOST_BELOW = 20_000
"""Entries that are looked at below one folder of the first."""
MOST_PICTURES = 2000
LONGEST = 400
"""Characters of a name."""
LARGEST = 1e300
"""Of a number; NaN is not below it either."""


class RunFolders:
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


def _below(folder: Path, depth: int, room: list[int] | None = None) -> Iterator[Path]:
    """Run folders; each folder of the first one has room for so many entries below it, so that none hides another."""
    if any(os.path.lexists(folder / sign) for sign in SIGNS):
        yield folder
        return
    for entry in entries_of(folder) if depth else ():
        left = [MOST_BELOW] if room is None else room
        left[0] -= 1
        if left[0] < 0:
            return
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _below(Path(entry.path), depth - 1, left)


def standing(folder: Path) -> dict[str, Any]:
    """What a list of runs says of one: its state, how far it is, what was measured before and after; and what of its
    files cannot be read."""
    config, bad_config = _read(folder / "config.yaml", read_yaml)
    summary, bad_summary = _read(folder / "summary.json", read_json)
    files = [folder / name for name in ("metrics.jsonl", "run.log", "config.yaml")]
    summary = _plain_summary(summary)
    return {
        "title": _word(config.get("name")) or folder.resolve().name,
        "state": _state(folder, summary),
        "changed": max((_changed(path) for path in files), default=0.0),
        "steps": _number(look_up(config, "trainer.steps")),
        "model": _word(look_up(config, "model.name")),
        "algorithm": _word(look_up(config, "algorithm.name")),
        "environment": _word(look_up(config, "env.name")),
        "seed": _number(config.get("seed")),
        "before": summary["before"],
        "after": summary["after"],
        "seconds": summary["train_seconds"],
        "failures": [_cause(one) for one in summary["failures"]],
        "problems": [problem for problem in (bad_config, bad_summary) if problem],
    }


def _state(folder: Path, summary: Mapping[str, Any]) -> str:
    if _held(folder / ".lock"):
        return "running"
    if summary["there"]:
        return "stopped" if summary["stopped"] else "finished"
    return "interrupted" if is_regular(folder / "metrics.jsonl") else "empty"


def _held(lock: Path) -> bool:
    """Whether a process trains there: it holds a lock, which the system's table of locks shows without touching it."""
    with suppress(OSError, ValueError):
        inode = str(lock.lstat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            if any(word.rpartition(":")[2] == inode and word.count(":") == 2 for word in line.split()):
                return True
    return False


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def read_config(folder: Path) -> dict[str, Any]:
    """The run's configuration; empty where there is none that can be read."""
    return _read(folder / "config.yaml", read_yaml)[0]


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's summary; empty where there is none yet. What has the wrong type in it is left out."""
    found = _read(folder / "summary.json", read_json)[0]
    return {key: value for key, value in _plain_summary(found).items() if key in found}


def _read(path: Path, reader: Callable[[Path], Any]) -> tuple[dict[str, Any], str]:
    """What a file says, and what is wrong with it; read again only where it has changed."""
    try:
        found = path.lstat()
    except OSError:
        return {}, ""
    return _known(path, reader, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(1024)
def _known(path: Path, reader: Callable[[Path], Any], stamp: tuple[int, ...]) -> tuple[dict[str, Any], str]:
    """Reading YAML takes longer than all else that a list of runs says."""
    try:
        found = reader(path)
    except ConfigError as error:
        return {}, str(error).removeprefix(f"{path.parent}/")
    except OSError as error:
        return {}, f"{path.name}: cannot be read: {error.strerror}"
    return (found, "") if isinstance(found, dict) else ({}, f"{path.name}: holds no keys with values.")


def _plain_summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """A summary whose values have the types that a run writes."""
    failures = found.get("failures")
    seconds = found.get("train_seconds")
    return {
        "there": bool(found),
        "stopped": bool(found.get("stopped")),
        "seed": _number(found.get("seed")),
        "steps": _number(found.get("steps")),
        "train_seconds": _number(seconds),
        "before": _numbers(found.get("before")),
        "after": _numbers(found.get("after")),
        "failures": [one for one in failures if isinstance(one, Mapping)] if isinstance(failures, list) else [],
    }


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
    found = [Path(entry.path) for entry in _files_below(folder / "frames", DEEP) if entry.name.endswith(".gif")]
    return {str(path.relative_to(folder)): path for path in sorted(found)[:MOST_PICTURES]}


def _files_below(folder: Path, depth: int) -> Iterator[os.DirEntry[str]]:
    for entry in entries_of(folder):
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                yield entry
            elif depth and entry.is_dir(follow_symlinks=False):
                yield from _files_below(Path(entry.path), depth - 1)


def _cause(failure: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: _word(failure.get(name)) for name in ("where", "kind", "message")}
    return told | {"count": _number(failure.get("count"))}


def _numbers(measured: Any) -> dict[str, float]:
    if not isinstance(measured, Mapping):
        return {}
    return {str(name): value for name, given in measured.items() if (value := _number(given)) is not None}


def _number(value: Any) -> Any:
    """A finite number of usual size; None of anything else."""
    return value if type(value) in (int, float) and abs(value) < LARGEST else None


def _word(value: Any) -> str | None:
    """A name, or another short text."""
    return value[:LONGEST] if isinstance(value, str) and value else None
