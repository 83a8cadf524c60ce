"""Which stateful calls have been begun and answered, on disk: a server that is killed and started again remembers."""

from __future__ import annotations

import sqlite3
import time
import uuid
from pathlib import Path

KEEP_SECONDS = 24 * 3600.0

TABLES = """
CREATE TABLE IF NOT EXISTS calls
    (key TEXT PRIMARY KEY, life TEXT NOT NULL, answer TEXT, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (name TEXT PRIMARY KEY, life TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
"""


class Journal:
    """Written before a call runs and after it has. Survives the process, not the loss of power.

    Example:
        journal = Journal(path)
        if journal.begin("key"):                 # first time
            journal.end("key", answer)
        journal.answer("key")                    # the answer; None if it was begun and never ended

    Args:
        path: the file; None keeps it in memory, for tools without state.
    """

    def __init__(self, path: Path | None):
        self.life = uuid.uuid4().hex
        """Names this run of the server."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._base = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute("PRAGMA synchronous=OFF")  # what the system has is written even if this process dies
        self._base.executescript(TABLES)
        for table in ("calls", "sessions"):
            self._base.execute(f"DELETE FROM {table} WHERE at < ?", (time.time() - KEEP_SECONDS,))

    def begin(self, key: str) -> bool:
        """Note that the call is about to run; False if it has been begun before, in this life or another."""
        row = (key, self.life, time.time())
        return self._base.execute("INSERT OR IGNORE INTO calls VALUES (?, ?, NULL, ?)", row).rowcount == 1

    def end(self, key: str, answer: str) -> None:
        """Note its answer."""
        self._base.execute("UPDATE calls SET answer = ? WHERE key = ?", (answer, key))

    def begun(self, key: str) -> bool:
        return self._base.execute("SELECT 1 FROM calls WHERE key = ?", (key,)).fetchone() is not None

    def answer(self, key: str) -> str | None:
        row = self._base.execute("SELECT answer FROM calls WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def open_session(self, name: str) -> bool:
        """Note that the session has state from now on; False if it had state in an earlier life, which is lost."""
        row = (name, self.life, time.time())
        self._base.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?)", row)
        life = self._base.execute("SELECT life FROM sessions WHERE name = ?", (name,)).fetchone()
        return bool(life and life[0] == self.life)

    def close_session(self, name: str) -> None:
        self._base.execute("DELETE FROM sessions WHERE name = ?", (name,))

    def close(self) -> None:
        self._base.close()
