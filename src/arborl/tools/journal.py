"""Which stateful calls have been begun and answered, on disk: a server that is killed and started again remembers."""

from __future__ import annotations

import logging
import sqlite3
import time
import uuid
from pathlib import Path

from arborl.errors import ArborError, ConfigError

log = logging.getLogger(__name__)

KEEP_SECONDS = 24 * 3600.0
BROKEN = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""What comes of a damaged file: messages may quote its bytes, and lengths it claims may be beyond all memory."""
VERSION = 2
"""Of the tables. A file with others is begun anew."""


class Unusable(ArborError):
    """The journal's disk is full, gone or damaged. What would have been noted must not be done."""


TABLES = """
CREATE TABLE IF NOT EXISTS calls
    (key TEXT PRIMARY KEY, digest TEXT NOT NULL, answer TEXT, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (name TEXT PRIMARY KEY, life TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
"""


class Journal:
    """Written before a call runs and after it has. Survives the process, not the loss of power.

    Example:
        journal = Journal(path)
        if journal.begin("key", digest):         # first time
            journal.end("key", answer)
        journal.find("key")                      # (digest, answer); the answer is None if it was begun and never ended

    Args:
        path: the file; None keeps it in memory, for tools without state.
    """

    def __init__(self, path: Path | None):
        self.life = uuid.uuid4().hex
        """Names this run of the server."""
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._base = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        except (*BROKEN, OSError) as error:
            raise ConfigError(_no_journal(path, error)) from error
        try:
            self._begin_life()
        except BROKEN as error:
            self.close()  # or it would lock out whoever mends the file
            raise ConfigError(_no_journal(path, error)) from error

    def _begin_life(self) -> None:
        base = self._base
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=OFF")  # what the system has is written even if this process dies
        if base.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            base.executescript("DROP TABLE IF EXISTS calls; DROP TABLE IF EXISTS sessions")
            base.execute(f"PRAGMA user_version = {VERSION}")
        base.executescript(TABLES)
        for table in ("calls", "sessions"):
            base.execute(f"DELETE FROM {table} WHERE at < ?", (time.time() - KEEP_SECONDS,))

    def begin(self, key: str, digest: str) -> bool:
        """Note that the call is about to run; False if it has been begun before, in this life or another."""
        return self._do("INSERT OR IGNORE INTO calls VALUES (?, ?, NULL, ?)", key, digest, time.time()).rowcount == 1

    def end(self, key: str, answer: str) -> None:
        """Note its answer. Where that fails the call has been made all the same, and stays known as begun."""
        try:
            self._do("UPDATE calls SET answer = ? WHERE key = ?", answer, key)
        except Unusable as error:
            log.warning("%s", error)

    def find(self, key: str) -> tuple[str, str | None] | None:
        """What the call under this key was, and its answer; None if it was never begun."""
        return self._do("SELECT digest, answer FROM calls WHERE key = ?", key).fetchone()

    def open_session(self, name: str) -> bool:
        """Note that the session has state from now on; False if it had state in an earlier life, which is lost."""
        self._do("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?)", name, self.life, time.time())
        life = self._do("SELECT life FROM sessions WHERE name = ?", name).fetchone()
        return bool(life and life[0] == self.life)

    def close_session(self, name: str) -> None:
        self._do("DELETE FROM sessions WHERE name = ?", name)

    def close(self) -> None:
        self._base.close()

    def _do(self, statement: str, *row: object) -> sqlite3.Cursor:
        try:
            return self._base.execute(statement, row)
        except BROKEN as error:
            raise Unusable(f"the journal of stateful calls cannot be used: {_said(error)}") from error


def _no_journal(path: Path | None, error: Exception) -> str:
    return f"{path}: not a journal that can be written ({_said(error)}). Remove it, or give another."


def _said(error: Exception) -> str:
    """SQLite's own error for want of memory says nothing."""
    return str(error) or "out of memory"
