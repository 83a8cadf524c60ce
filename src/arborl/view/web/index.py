"""The SQLite index of a run's episodes: one row per episode.

It is stored in the user's cache, never in the run folder: SQLite follows journals and links beside a database, and a
run folder may be untrusted. Files are read incrementally, newest step first; a replaced file is read again.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from arborl.rollout.episode_store import EPISODE_FILE
from arborl.track.folder_files import (
    MAX_LINES_FILE,
    Unreadable,
    entries_of,
    finite_number,
    is_regular,
    open_regular,
    read_lines,
)
from arborl.types import NOT_SAMPLED

log = logging.getLogger(__name__)

MAX_SEARCHED_TEXT = 20_000
"""Searchable characters of an episode."""
COLUMNS = (
    "source", "agent", "env", "reward", "success", "stop", "failure", "turns", "calls", "sampled", "context",
    "branches", "version", "seconds", "weight",
)  # fmt: skip
"""Columns of the filters: short, so that scans are fast."""
NAMES = ("episode", "task", "preview")
"""Columns that are only shown."""
SCHEMA_VERSION = 6
"""An index of another version is rebuilt."""
KINDS = {"train": "episodes", "evaluation": "episodes/evaluation"}
"""Folders of episode files by kind."""
COMMIT_SECONDS = 0.15
"""Interval of commits."""
LOCK_SECONDS = 30.0
"""Timeout for another process that writes the same index."""
MAX_PAGE_BYTES = 2**26
"""Bytes of the episodes of one page."""
ENSURE_SECONDS = 10.0
"""How long a request waits for one step's file."""
MAX_AGE_SECONDS = 60 * 86_400
"""Age at which an unused index is deleted."""
TABLES = f"""
CREATE TABLE IF NOT EXISTS files (
    kind TEXT, step INTEGER, inode INTEGER, size INTEGER, changed INTEGER, read INTEGER, lines INTEGER, bad INTEGER,
    tasks INTEGER, last TEXT, PRIMARY KEY (kind, step));
CREATE TABLE IF NOT EXISTS episodes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT, step INTEGER, line INTEGER, begin INTEGER, length INTEGER,
    tree INTEGER, lag INTEGER, {", ".join(COLUMNS)});
CREATE TABLE IF NOT EXISTS names (number INTEGER PRIMARY KEY, {", ".join(NAMES)});
CREATE INDEX IF NOT EXISTS by_place ON episodes (step DESC, kind DESC, line, stop, source, failure, reward, lag);
CREATE INDEX IF NOT EXISTS by_task ON names (task);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, content='', detail=none, tokenize='unicode61');
PRAGMA user_version = {SCHEMA_VERSION};
"""


@dataclass(frozen=True, slots=True)
class EpisodeFile:
    """An episode file and its current size and times."""

    kind: str
    step: int
    path: Path
    inode: int
    size: int
    changed: int


class EpisodeIndex:
    """The index of one run, in the folder `cache`, by default the user's. The run folder is only read."""

    def __init__(self, folder: Path, cache: Path | None = None):
        self.folder, self.cache = folder, cache
        self.path: Path | None = None
        self.done = 1.0
        """Share of the bytes that are indexed."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Update the index in the background."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._open()
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait; returns whether the index is up to date."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._open()
        with closing(self._connect()) as connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def files(self) -> list[EpisodeFile]:
        """The episode files, newest step first."""
        found = []
        for kind, place in KINDS.items():
            for entry in entries_of(self.folder / place):
                if (named := EPISODE_FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    step = int(named[1])
                    found.append(EpisodeFile(kind, step, Path(entry.path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda file: (-file.step, file.kind))

    def ensure(self, kind: str, step: int) -> None:
        """Index this step's file first, within `ENSURE_SECONDS`."""
        with self._lock:
            self._open()
        path = self.folder / KINDS.get(kind, "") / f"step-{step:06}.jsonl"
        if kind not in KINDS or not is_regular(path):
            return
        try:
            stat = path.lstat()
        except OSError:
            return
        file = EpisodeFile(kind, step, path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        with closing(self._connect()) as connection:
            query = "SELECT inode, size, changed FROM files WHERE kind = ? AND step = ?"
            if connection.execute(query, (kind, step)).fetchone() != (file.inode, file.size, file.changed):
                until = time.monotonic() + ENSURE_SECONDS
                while not self._read_some(connection, file) and time.monotonic() < until:
                    pass

    def lines(self, kind: str, step: int, wanted: Sequence[int]) -> dict[int, bytes]:
        """The bytes of some episodes of a step by line, at most `MAX_PAGE_BYTES` in all."""
        if kind not in KINDS:
            return {}
        with self.reading() as rows:
            query = "SELECT line, begin, length FROM episodes WHERE kind = ? AND step = ? ORDER BY line"
            places = {line: (begin, length) for line, begin, length in rows.execute(query, (kind, step))}
        found: dict[int, bytes] = {}
        remaining = MAX_PAGE_BYTES
        try:
            with open_regular(self.folder / KINDS[kind] / f"step-{step:06}.jsonl", MAX_LINES_FILE) as file:
                for line in (one for one in dict.fromkeys(wanted) if one in places):
                    begin, length = places[line]
                    remaining -= length
                    if remaining >= 0 or not found:
                        file.seek(begin)
                        found[line] = file.read(length)
        except (OSError, Unreadable):
            return {}
        return dict(sorted(found.items()))

    # -------------------------------------------------------------------------------------------- writing

    def _open(self) -> None:
        if self.path is not None:
            return
        problems = []
        for place in (self.cache or user_cache(), *(() if self.cache else (_process_cache(),))):
            try:
                place.mkdir(parents=True, exist_ok=True, mode=0o700)
                self.path = place / f"{self._identity()}.sqlite3"
                self._prepare()
                os.utime(self.path)
                return
            except (OSError, sqlite3.OperationalError) as error:
                self.path = None
                problems.append(f"{place}: {error}")
        raise OSError(f"no index can be written: {'; '.join(problems)}")

    def _identity(self) -> str:
        """Hash of the folder's path, device and inode."""
        stat = self.folder.stat()
        identity = f"{self.folder.resolve()}\0{stat.st_dev}\0{stat.st_ino}"
        return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def _prepare(self) -> None:
        """Create the tables; rebuild an index of another version or a damaged one."""
        assert self.path is not None
        for attempt in (1, 2):
            try:
                with closing(self._connect()) as connection:
                    version = connection.execute("PRAGMA user_version").fetchone()[0]
                    if version == SCHEMA_VERSION:
                        return
                    if version == 0:
                        connection.execute("PRAGMA journal_mode = WAL")
                        connection.executescript(TABLES)
                        return
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                if attempt == 2:
                    raise OSError(f"{self.path}: {error}") from error
            for end in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        return sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None)

    def _work(self) -> None:
        try:
            with closing(self._connect()) as connection:
                connection.execute("PRAGMA synchronous = OFF")  # lost rows are read again
                files = self.files()
                _drop_missing(connection, files)
                total, left = sum(file.size for file in files), list[EpisodeFile]()
                known = {(kind, step): rest for kind, step, *rest in connection.execute(
                    "SELECT kind, step, inode, size, changed FROM files")}  # fmt: skip
                for file in files:
                    if known.get((file.kind, file.step)) != [file.inode, file.size, file.changed]:
                        left.append(file)
                due = sum(file.size for file in left)
                for file in left:
                    self.done = 1.0 - due / max(total, 1)
                    while not self._read_some(connection, file):
                        pass
                    due -= file.size
                self.done = 1.0
        except (sqlite3.Error, OSError) as error:
            log.warning("%s: the index is not up to date: %s", self.folder, error)

    def _read_some(self, connection: sqlite3.Connection, file: EpisodeFile) -> bool:
        """Index some lines in one transaction; returns whether the file is done."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            state = connection.execute(
                "SELECT inode, size, changed, read, lines, bad, tasks, last FROM files WHERE kind = ? AND step = ?",
                (file.kind, file.step),
            ).fetchone()
            inode, size, changed, read, lines, bad, tasks, last = state or (file.inode, 0, 0, 0, 0, 0, -1, "")
            if state and (size, changed) == (file.size, file.changed) and inode == file.inode:
                return True
            if inode != file.inode or file.size < read or (state and size == file.size):  # another file of that name
                _drop(connection, file.kind, file.step)
                read = lines = bad = 0
                tasks, last = -1, ""
            inserted: list[tuple[Any, ...]] = []
            named: list[tuple[Any, ...]] = []
            until, whole = time.monotonic() + COMMIT_SECONDS, True
            with closing(read_lines(file.path, read)) as stream:
                for length, line in stream:
                    if not line.endswith(b"\n"):  # unfinished line
                        break
                    found = row_of(line)
                    if found is None:
                        bad += 1
                    else:
                        columns, text = found
                        task, _, opened = last.partition("\n")
                        if columns["task"] != task or columns["episode"] == opened:  # another group
                            tasks, last = tasks + 1, f"{columns['task']}\n{columns['episode']}"
                        inserted.append(_row(file, lines, read, length, tasks, columns))
                        named.append((*(columns[name] for name in NAMES), text))
                    lines, read = lines + 1, read + length
                    if time.monotonic() > until:
                        whole = False
                        break
            _insert(connection, inserted, named)
            stamp = (file.size, file.changed) if whole else (-1, 0)
            connection.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (file.kind, file.step, file.inode, *stamp, read, lines, bad, tasks, last),
            )
            return whole
        except (OSError, Unreadable):  # removed meanwhile, or not a text file
            return True
        finally:
            connection.execute("COMMIT")


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arborl" / "view"


def delete_unused(cache: Path) -> None:
    for entry in entries_of(cache):
        with suppress(OSError):
            if entry.name.endswith(".sqlite3") and time.time() - entry.stat().st_mtime > MAX_AGE_SECONDS:
                for end in ("", "-wal", "-shm"):
                    Path(entry.path + end).unlink(missing_ok=True)


@cache
def _process_cache() -> Path:
    """A temporary folder, if the user's cache is not writable."""
    made = tempfile.mkdtemp(prefix="arborl-view-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _row(file: EpisodeFile, line: int, begin: int, length: int, tree: int, columns: dict[str, Any]) -> tuple[Any, ...]:
    """Training step N samples with version N - 1, an evaluation of step N with version N."""
    version = columns["version"]
    lag = None if version is None else file.step - (file.kind == "train") - version
    return (file.kind, file.step, line, begin, length, tree, lag, *(columns[name] for name in COLUMNS))


def _insert(connection: sqlite3.Connection, rows: list[tuple[Any, ...]], named: list[tuple[Any, ...]]) -> None:
    given = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'episodes'").fetchone()
    first = 1 + (given[0] if given else 0)
    marks = ", ".join("?" * (8 + len(COLUMNS)))
    numbered = [(first + at, *row) for at, row in enumerate(rows)]
    connection.executemany(f"INSERT INTO episodes VALUES ({marks})", numbered)
    names = [(first + at, *row[:-1]) for at, row in enumerate(named)]
    connection.executemany(f"INSERT INTO names VALUES ({', '.join('?' * (1 + len(NAMES)))})", names)
    words = [(first + at, row[-1]) for at, row in enumerate(named)]
    connection.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", words)


def _drop(connection: sqlite3.Connection, kind: str, step: int) -> None:
    """Delete a file's rows. The text index keeps its words: numbers are never reused."""
    numbers = "SELECT number FROM episodes WHERE kind = ? AND step = ?"
    connection.execute(f"DELETE FROM names WHERE number IN ({numbers})", (kind, step))
    connection.execute("DELETE FROM episodes WHERE kind = ? AND step = ?", (kind, step))
    connection.execute("DELETE FROM files WHERE kind = ? AND step = ?", (kind, step))


def _drop_missing(connection: sqlite3.Connection, files: list[EpisodeFile]) -> None:
    """Delete the rows of removed files."""
    there = {(file.kind, file.step) for file in files}
    connection.execute("BEGIN IMMEDIATE")
    for kind, step in connection.execute("SELECT kind, step FROM files").fetchall():
        if (kind, step) not in there:
            _drop(connection, kind, step)
    connection.execute("COMMIT")


def row_of(line: bytes) -> tuple[dict[str, Any], str] | None:
    """The columns of an episode and its searchable text; None if the line is no episode."""
    try:
        row = json.loads(line.decode("utf-8", "surrogatepass"))
        return _columns(row), "\n".join(_texts(row))[:MAX_SEARCHED_TEXT].encode("utf-8", "replace").decode()
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    task, calls, failure = row["task"], row["calls"], row["failure"]
    versions = [min(call.get("versions") or [call["version"]]) for call in calls if call["tokens"]]
    sampled = [version for version in versions if version != NOT_SAMPLED]
    rewards = [float(value) for value in row["rewards"].values()]
    return {
        "episode": _short_text(row["id"], 400),
        "task": _short_text(task["id"], 400),
        "source": _short_text(task.get("source") or "", 200),
        "agent": _short_text(task.get("agent") or "", 200),
        "env": _short_text(task.get("env") or "", 200),
        "reward": finite_number(math.fsum(rewards)) if failure is None and all(map(math.isfinite, rewards)) else None,
        "success": finite_number(row["metrics"].get("success")),
        "stop": _short_text(row["stop"], 60),
        "failure": _short_text(f"{failure['where']}: {failure['kind']}", 300) if failure else "",
        "turns": len(row["turns"]),
        "calls": len(calls),
        "sampled": sum(len(call["tokens"]) for call in calls),
        "context": max(map(_length, calls), default=0),
        "branches": sum(map(_starts_branch, [None, *calls], calls)),
        "version": min(sampled, default=None),
        "seconds": finite_number(row["seconds"]),
        "weight": finite_number(row.get("weight", 1.0)),
        "preview": _short_text(next(iter(_last_messages(row)), ""), 160),
    }


def _starts_branch(earlier: Mapping[str, Any] | None, later: Mapping[str, Any]) -> bool:
    """Whether a call does not extend the call before it: approximately a new branch."""
    return earlier is None or bool(later["prompt"][1] < _length(earlier))


def _length(call: Mapping[str, Any]) -> int:
    return int(call["prompt"][1]) + len(call["prompt"][2]) + len(call["tokens"])


def _last_messages(row: Mapping[str, Any]) -> Iterator[str]:
    """The last messages of the agent, newest first."""
    for turn in reversed(row["turns"]):
        yield str(turn["message"]["content"])
    for call in reversed(row["calls"]):
        if call.get("reply"):
            yield str(call["reply"]["content"])


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    yield str(row["id"])
    for message in (*row["task"]["messages"], *row["opening"]):
        yield from _message_texts(message)
    for turn in row["turns"]:
        yield from _message_texts(turn["message"])
        for message in turn["observation"]:
            yield from _message_texts(message)
    for call in row["calls"]:
        for message in call.get("messages", (0, 0, ()))[2]:
            if message["role"] == "tool":
                yield from _message_texts(message)
    if row["failure"]:
        yield f"{row['failure']['where']} {row['failure']['kind']} {row['failure']['message']}"


def _message_texts(message: Mapping[str, Any]) -> Iterator[str]:
    yield str(message["content"])
    for call in message.get("tool_calls", ()):
        yield f"{call['name']} {call['arguments']}"


def _short_text(value: Any, most: int) -> str:
    return str(value)[:most].encode("utf-8", "replace").decode()
