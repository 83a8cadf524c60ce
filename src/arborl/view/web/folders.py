"""The run folders below a folder: list, state, differences of their configurations, and metrics."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.track.folder_files import Unreadable, entries_of, finite_number, is_regular, read_json, read_yaml
from arborl.track.jsonl import read_metrics

MAX_DEPTH = 4
"""Depth of the search for run folders."""
RUN_FILES = ("config.yaml", "metrics.jsonl")
"""A folder with one of these is a run folder."""
PARTS = {"model", "algorithm", "env", "agent", "engine"}
"""Sections that may be written as a bare name."""
IGNORED_KEYS = {"output_dir", "name"}
"""Keys that differ between any two runs."""
LIST_SECONDS = 1.0
"""Validity of a listing."""
MAX_ENTRIES_BELOW = 20_000
"""Entries that are listed below each top-level folder."""
MAX_IMAGES = 2000
MAX_FILES = 4096
"""Configurations, summaries and other small files in the cache."""
MAX_ROLLBACKS = 20
MAX_TEXT = 400
MAX_SET_ASIDE = 50
"""Entries of `quarantine` that are shown."""
Stamp = tuple[int, int, int]


class RunFolders:
    """The run folders below a folder. A name from a browser is looked up here and never becomes a path."""

    def __init__(self, root: Path):
        self.root = root
        self._found: dict[str, Path] = {}
        self._at = float("-inf")
        self._lock = threading.Lock()

    def all(self) -> dict[str, Path]:
        with self._lock:
            if time.monotonic() - self._at > LIST_SECONDS:
                found = {str(path.relative_to(self.root)): path for path in _below(self.root, MAX_DEPTH)}
                self._found, self._at = dict(sorted(found.items())), time.monotonic()
            return self._found

    def __getitem__(self, name: str) -> Path:
        return self.all()[name]


def _below(folder: Path, depth: int, remaining: list[int] | None = None) -> Iterator[Path]:
    """Run folders. Each top-level folder has its own limit of entries, so that none hides another."""
    if any(os.path.lexists(folder / name) for name in RUN_FILES):
        yield folder
        return
    for entry in entries_of(folder) if depth else ():
        left = [MAX_ENTRIES_BELOW] if remaining is None else remaining
        left[0] -= 1
        if left[0] < 0:
            return
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _below(Path(entry.path), depth - 1, left)


def run_state(folder: Path) -> dict[str, Any]:
    """State, progress and evaluation of a run, and problems with its files."""
    config, bad_config = read_mapping(folder / "config.yaml", read_yaml)
    summary, bad_summary = read_mapping(folder / "summary.json", read_json)
    files = [folder / name for name in ("metrics.jsonl", "run.log", "config.yaml")]
    summary = _plain_summary(summary)
    return {
        "title": _text(config.get("name")) or folder.resolve().name,
        "state": _state(folder, summary),
        "stub": config.get("stub") is True,
        "changed": max((_changed(path) for path in files), default=0.0),
        "started": _changed(folder / "config.yaml") or _changed(folder / "metrics.jsonl"),
        "steps": finite_number(look_up(config, "trainer.steps")),
        "model": _text(look_up(config, "model.name")),
        "algorithm": _text(look_up(config, "algorithm.name")),
        "environment": _text(look_up(config, "env.name")),
        "seed": finite_number(config.get("seed")),
        "before": summary["before"],
        "after": summary["after"],
        "seconds": summary["train_seconds"],
        "failures": [_cause(one) for one in summary["failures"]],
        "accounting": summary["accounting"],
        "quarantine": summary["quarantine"],
        "problems": [problem for problem in (bad_config, bad_summary) if problem],
    }


def _state(folder: Path, summary: Mapping[str, Any]) -> str:
    if _is_locked(folder / ".lock"):
        return "running"
    if summary["there"]:
        return "stopped" if summary["stopped"] else "finished"
    return "interrupted" if is_regular(folder / "metrics.jsonl") else "empty"


def _is_locked(lock: Path) -> bool:
    """Whether a training process holds the lock, read from /proc/locks."""
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
    """The run's configuration; empty if it cannot be read."""
    return read_mapping(folder / "config.yaml", read_yaml)[0]


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's summary without values of wrong types; empty if there is none."""
    found = read_mapping(folder / "summary.json", read_json)[0]
    return {key: value for key, value in _plain_summary(found).items() if key in found}


def read_mapping(path: Path, reader: Callable[[Path], Any]) -> tuple[dict[str, Any], str]:
    """The content of a file and its problem; cached until the file changes."""
    try:
        found = path.lstat()
    except OSError:
        return {}, ""
    return _read_cached(path, reader, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(MAX_FILES)
def _read_cached(path: Path, reader: Callable[[Path], Any], stamp: tuple[int, ...]) -> tuple[dict[str, Any], str]:
    try:
        found = reader(path)
    except ConfigError as error:
        return {}, str(error).removeprefix(f"{path.parent}/")
    except OSError as error:
        return {}, f"{path.name}: cannot be read: {error.strerror}"
    return (found, "") if isinstance(found, dict) else ({}, f"{path.name}: is not a mapping.")


def read_execution(folder: Path) -> dict[str, str]:
    """Device, precision and execution paths of the run; empty if they are not known."""
    return _texts(read_mapping(folder / "execution.json", read_json)[0])


def flat_config(folder: Path) -> dict[str, Any]:
    """The run's settings by dotted key; cached until the file changes. A bare name of a part is its `name`."""
    path = folder / "config.yaml"
    return _flat_cached(path, _stamp(path))


@lru_cache(MAX_FILES)
def _flat_cached(path: Path, stamp: Stamp) -> dict[str, Any]:
    found = flat(read_config(path.parent))
    return {f"{key}.name" if key in PARTS and isinstance(value, str) else key: value for key, value in found.items()}


def _plain_summary(found: Mapping[str, Any]) -> dict[str, Any]:
    failures, rollbacks = found.get("failures"), found.get("rollbacks")
    return {
        "there": bool(found),
        "stopped": bool(found.get("stopped")),
        "seed": finite_number(found.get("seed")),
        "steps": finite_number(found.get("steps")),
        "train_seconds": finite_number(found.get("train_seconds")),
        "before": _numbers(found.get("before")),
        "after": _numbers(found.get("after")),
        "failures": [one for one in failures if isinstance(one, Mapping)] if isinstance(failures, list) else [],
        "accounting": _accounting(found.get("accounting")),
        "quarantine": _quarantine(found.get("quarantine")),
        "alarm": _texts(found.get("alarm")),
        "rollbacks": [_texts(one) for one in rollbacks[:MAX_ROLLBACKS]] if isinstance(rollbacks, list) else [],
    }


def _quarantine(found: Any) -> list[dict[str, Any]]:
    """The list `quarantine` of summary.json: what is set aside, why, and until which step."""
    rows = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    texts = [{name: _text(one.get(name)) for name in ("what", "failure")} for one in rows[:MAX_SET_ASIDE]]
    numbers = [{name: finite_number(one.get(name)) for name in ("failed_draws", "until_step")} for one in rows]
    return [text | number for text, number in zip(texts, numbers, strict=False)]


def _accounting(found: Any) -> dict[str, float]:
    """The table `accounting` of summary.json by names as in the metrics: `started`, `dropped/stale`."""
    if not isinstance(found, Mapping):
        return {}
    dropped = {f"dropped/{why}"[:MAX_TEXT]: count for why, count in list(_numbers(found.get("dropped")).items())[:40]}
    return _numbers({name: found.get(name) for name in ("started", "trained", "pending")}) | dropped


def _texts(found: Any) -> dict[str, str]:
    pairs = list(found.items())[:20] if isinstance(found, Mapping) else []
    texts = {name: str(value) if type(value) in (int, float) else _text(value) for name, value in pairs}
    return {name: text for name, text in texts.items() if text is not None}


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """The value of `model.name` in a nested mapping; a part may be its bare name."""
    found: Any = config
    for key in path.split("."):
        if isinstance(found, str) and key == "name":
            return found
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def flat(config: Any, before: str = "") -> dict[str, Any]:
    """Dotted keys: `{'a.b': 1}` of `{'a': {'b': 1}}`."""
    if not isinstance(config, Mapping) or not config:
        return {before: config} if before else {}
    return {
        name: value
        for key, inner in config.items()
        for name, value in flat(inner, f"{before}.{key}" if before else str(key)).items()
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Settings that differ, with the value of each run, and settings that are equal in all."""
    rows = [flat(config) for config in configs]
    names = dict.fromkeys(name for row in rows for name in row)
    differ, same = {}, {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(value != values[0] for value in values):
            if name not in IGNORED_KEYS:
                differ[name] = values
        else:
            same[name] = values[0]
    return differ, same


def pictures(folder: Path) -> dict[str, Path]:
    """GIFs of the run by relative path."""
    found = [Path(entry.path) for entry in _files_below(folder / "frames", MAX_DEPTH) if entry.name.endswith(".gif")]
    return {str(path.relative_to(folder)): path for path in sorted(found)[:MAX_IMAGES]}


def _files_below(folder: Path, depth: int) -> Iterator[os.DirEntry[str]]:
    for entry in entries_of(folder):
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                yield entry
            elif depth and entry.is_dir(follow_symlinks=False):
                yield from _files_below(Path(entry.path), depth - 1)


def _cause(cause: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of `failures` in summary.json: `{"count": 3, "failure": {"where": …, "kind": …, "message": …}}`."""
    failure = cause.get("failure")
    failure = failure if isinstance(failure, Mapping) else {}
    texts = {name: _text(failure.get(name)) for name in ("where", "kind", "message")}
    return texts | {"count": finite_number(cause.get("count"))}


def _numbers(measured: Any) -> dict[str, float]:
    if not isinstance(measured, Mapping):
        return {}
    return {str(name): value for name, number in measured.items() if (value := finite_number(number)) is not None}


def _text(value: Any) -> str | None:
    return value[:MAX_TEXT] if isinstance(value, str) and value else None


# ------------------------------------------------------------------------------------------------ metrics

MAX_CACHED = 32
"""Files in the cache."""
MAIN_METRICS = ("reward/mean", "episode/success", "policy/loss")
"""Metrics whose first and last values the list of runs has."""
MAX_VALUES = 5_000_000
"""Numbers of a run that are read; of more, those of the first steps."""

Rows = list[dict[str, Any]]
_known: dict[Path, tuple[Stamp, Rows, str]] = {}
_lock = threading.Lock()


def read_rows(folder: Path) -> tuple[Rows, str]:
    """The rows of `metrics.jsonl` and the file's problem; cached until the file changes."""
    path, stamp = folder / "metrics.jsonl", stamp_of(folder)
    known = _known.get(path)
    if known is None or known[0] != stamp:
        known = (stamp, *_read_rows(path))
        with _lock:
            _known.pop(path, None)
            while len(_known) >= MAX_CACHED:
                _known.pop(next(iter(_known)))
            _known[path] = known
    return known[1:]


def _read_rows(path: Path) -> tuple[Rows, str]:
    rows: Rows = []
    count = 0
    try:
        for row in read_metrics(path):
            count += len(row)
            if count > MAX_VALUES:
                return rows, f"{path.name}: has more than {MAX_VALUES:,} numbers; the first are shown."
            rows.append(row)
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{path.name}: cannot be read: {error.strerror}"
    except Unreadable as error:
        return [], str(error).removeprefix(f"{path.parent}/")
    return rows, ""


def stamp_of(folder: Path) -> Stamp:
    return _stamp(folder / "metrics.jsonl")


def _stamp(path: Path) -> Stamp:
    """Changes with the file."""
    try:
        found = path.lstat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def stamps_of(folder: Path, names: Sequence[str]) -> list[int]:
    """Size and time of some files; changes with any of them."""
    return [number for name in names for number in _stamp(folder / name)[1:]]


def progress(folder: Path) -> dict[str, Any]:
    """Last step, training seconds, first and last values of the main metrics; cached until the metrics change."""
    return _progress_cached(folder / "metrics.jsonl", stamp_of(folder))


@lru_cache(MAX_FILES)
def _progress_cached(path: Path, stamp: Stamp) -> dict[str, Any]:
    known = _known.get(path)
    rows, problem = known[1:] if known is not None and known[0] == stamp else _read_rows(path)
    ends: dict[str, list[float]] = {}
    for name in MAIN_METRICS:
        values = [value for row in rows if (value := finite_number(row.get(name))) is not None]
        if values:
            ends[name] = [values[0], values[-1]]
    seconds = [value for row in rows if (value := finite_number(row.get("time/step"))) is not None]
    return {
        "step": rows[-1]["step"] if rows else 0,
        "train_seconds": math.fsum(seconds) if seconds else None,
        "ends": ends,
        "problem": problem,
    }


def read_accounting(folder: Path) -> dict[str, float]:
    """Numbers of episodes by state: of the summary, or of the last step of a run that has none; empty if unknown."""
    if found := run_state(folder)["accounting"]:
        return dict(found)
    rows = [row for row in read_rows(folder)[0] if "episodes/started" in row]
    counts = {} if not rows else {key.removeprefix("episodes/"): rows[-1][key] for key in rows[-1] if _is_state(key)}
    return _numbers(dict(list(counts.items())[:40]))


def _is_state(metric: str) -> bool:
    return metric.startswith("episodes/") and metric != "episodes/dropped"


def names_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
