"""The index of a run's episodes: one row an episode, found without reading the files.

It lies in the user's cache, under the run folder's path and identity, and never in the run folder: SQLite follows what
it finds beside a database (journals, links), and a run folder may be a stranger's. Files are read once, newest step
first, from where reading stopped; a file that was replaced is read again. A page that is asked for meanwhile says how
much is indexed.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from arborl.rollout.episode_store import EPISODE_FILE
from arborl.track.folder_files import MAX_LINES_FILE, Unreadable, entries_of, is_regular, open_regular, read_lines
from arborl.view.web.rows import COLUMNS, NAMES, row_of

log = logging.getLogger(__name__)

FORM = 6
"""Of the tables; an index of another form is made anew."""
KINDS = {"train": "episodes", "evaluation": "episodes/evaluation"}
"""Folders of episode files, by what their episodes were played for."""
AT_ONCE = 0.15
"""Seconds between two commits: whoever asks sees the rows then."""
PATIENCE = 30.0
"""Seconds that another process may take to write the same index."""
MAX_SHOWN = 2**26
"""Bytes of the episodes that one page is made of."""
AT_MOST = 10.0
"""Seconds that a request waits until one step's file is read."""
UNUSED = 60 * 86_400
"""Seconds after which an index that was not opened is deleted."""
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
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(said, content='', detail=none, tokenize='unicode61');
PRAGMA user_version = {FORM};
"""


@dataclass(frozen=True, slots=True)
class File:
    """An episode file as it is now."""

    kind: str
    step: int
    path: Path
    inode: int
    size: int
    changed: int


class EpisodeIndex:
    """The index of one run.

    Args:
        folder: of the run; it is only read.
        cache: where indices are kept; the user's cache by default.

    Example:
        index = EpisodeIndex(folder)
        index.begin()
        index.wait(0.5)
        with index.reading() as rows:
            rows.execute("SELECT count(*) FROM episodes").fetchone()
    """

    def __init__(self, folder: Path, cache: Path | None = None):
        self.folder, self.cache = folder, cache
        self.path: Path | None = None
        self.done = 1.0
        """Share of the bytes that were read."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Bring the index up to date, beside whoever asks."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._open()
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it is up to date by then."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to ask through."""
        with self._lock:
            self._open()
        with closing(self._connect()) as connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def files(self) -> list[File]:
        """The episode files, newest step first."""
        found = []
        for kind, place in KINDS.items():
            for entry in entries_of(self.folder / place):
                if (named := EPISODE_FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    step = int(named[1])
                    found.append(File(kind, step, Path(entry.path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda file: (-file.step, file.kind))

    def ensure(self, kind: str, step: int) -> None:
        """Read this step's file, whatever else waits, for `AT_MOST` seconds: a link leads to it."""
        with self._lock:
            self._open()
        path = self.folder / KINDS.get(kind, "") / f"step-{step:06}.jsonl"
        if kind not in KINDS or not is_regular(path):
            return
        try:
            stat = path.lstat()
        except OSError:
            return
        file = File(kind, step, path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        with closing(self._connect()) as connection:
            asked = "SELECT inode, size, changed FROM files WHERE kind = ? AND step = ?"
            if connection.execute(asked, (kind, step)).fetchone() != (file.inode, file.size, file.changed):
                until = time.monotonic() + AT_MOST
                while not self._read_some(connection, file) and time.monotonic() < until:
                    pass

    def lines(self, kind: str, step: int, wanted: Sequence[int]) -> dict[int, bytes]:
        """The bytes of some episodes of a step, by their line; without those that are not there, and those beyond
        `MAX_SHOWN` bytes in all."""
        if kind not in KINDS:
            return {}
        with self.reading() as rows:
            asked = "SELECT line, begin, length FROM episodes WHERE kind = ? AND step = ? ORDER BY line"
            places = {line: (begin, length) for line, begin, length in rows.execute(asked, (kind, step))}
        found: dict[int, bytes] = {}
        room = MAX_SHOWN
        try:
            with open_regular(self.folder / KINDS[kind] / f"step-{step:06}.jsonl", MAX_LINES_FILE) as file:
                for line in (one for one in dict.fromkeys(wanted) if one in places):
                    begin, length = places[line]
                    room -= length
                    if room >= 0 or not found:
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
        for place in (self.cache or user_cache(), *(() if self.cache else (_own_folder(),))):
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
        """Of the folder: where it is, and which one it is."""
        found = self.folder.stat()
        told = f"{self.folder.resolve()}\0{found.st_dev}\0{found.st_ino}"
        return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def _prepare(self) -> None:
        """The tables, there and of this form. What is no index of ours is made anew."""
        assert self.path is not None
        for attempt in (1, 2):
            try:
                with closing(self._connect()) as connection:
                    form = connection.execute("PRAGMA user_version").fetchone()[0]
                    if form == FORM:
                        return
                    if form == 0:
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
        return sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)

    def _work(self) -> None:
        try:
            with closing(self._connect()) as connection:
                connection.execute("PRAGMA synchronous = OFF")  # what is lost is read again
                files = self.files()
                _forget(connection, files)
                total, left = sum(file.size for file in files), list[File]()
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

    def _read_some(self, connection: sqlite3.Connection, file: File) -> bool:
        """Some lines of a file, in one transaction; whether it is done. Another process may have read some before."""
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
            until, whole = time.monotonic() + AT_ONCE, True
            with closing(read_lines(file.path, read)) as stream:
                for length, line in stream:
                    if not line.endswith(b"\n"):  # half a line of a file that grows
                        break
                    found = row_of(line)
                    if found is None:
                        bad += 1
                    else:
                        columns, said = found
                        task, _, opened = last.partition("\n")
                        if columns["task"] != task or columns["episode"] == opened:  # another group
                            tasks, last = tasks + 1, f"{columns['task']}\n{columns['episode']}"
                        inserted.append(_row(file, lines, read, length, tasks, columns))
                        named.append((*(columns[name] for name in NAMES), said))
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
        except (OSError, Unreadable):  # it went while it was read, or is no file of lines
            return True
        finally:
            connection.execute("COMMIT")


def user_cache() -> Path:
    """Where the indices of this user's viewers are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arborl" / "view"


def delete_unused(cache: Path) -> None:
    """Indices that were not opened for long: their run folders are probably gone."""
    for entry in entries_of(cache):
        with suppress(OSError):
            if entry.name.endswith(".sqlite3") and time.time() - entry.stat().st_mtime > UNUSED:
                for end in ("", "-wal", "-shm"):
                    Path(entry.path + end).unlink(missing_ok=True)


@cache
def _own_folder() -> Path:
    """Of this process, where the user's cache cannot be written; it goes with the process."""
    made = tempfile.mkdtemp(prefix="arborl-view-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _row(file: File, line: int, begin: int, length: int, tree: int, columns: dict[str, Any]) -> tuple[Any, ...]:
    """Training step N is played with the weights of step N - 1; an evaluation of step N with those of N."""
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
    connection.executemany("INSERT INTO words (rowid, said) VALUES (?, ?)", words)


def _drop(connection: sqlite3.Connection, kind: str, step: int) -> None:
    """Its words stay: no number is given out twice, and whoever searches looks for rows that are there."""
    own = "SELECT number FROM episodes WHERE kind = ? AND step = ?"
    connection.execute(f"DELETE FROM names WHERE number IN ({own})", (kind, step))
    connection.execute("DELETE FROM episodes WHERE kind = ? AND step = ?", (kind, step))
    connection.execute("DELETE FROM files WHERE kind = ? AND step = ?", (kind, step))


def _forget(connection: sqlite3.Connection, files: list[File]) -> None:
    """Rows of files that are gone."""
    there = {(file.kind, file.step) for file in files}
    connection.execute("BEGIN IMMEDIATE")
    for kind, step in connection.execute("SELECT kind, step FROM files").fetchall():
        if (kind, step) not in there:
            _drop(connection, kind, step)
    connection.execute("COMMIT")
