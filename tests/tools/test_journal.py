"""The journal of stateful calls where it cannot be written."""

import subprocess
import sys

PROGRAM = """
import sqlite3, sys
from contextlib import suppress
from pathlib import Path
from arborl.errors import ConfigError
from arborl.tools.remote.tool_dispatcher import CallJournal, JournalUnavailable

journal = CallJournal(Path(sys.argv[1]))
with suppress(MemoryError):
    sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit = 1")  # from here on SQLite finds no memory
for use in (lambda: journal.begin("key", "digest" * 100_000), lambda: CallJournal(Path(sys.argv[1]))):
    try:
        use()
    except (JournalUnavailable, ConfigError) as error:
        print(error)
"""


def test_a_lack_of_memory_gives_a_one_line_error_and_no_call(tmp_path):
    """In a process of its own: the limit is of all that SQLite does there, and cannot be taken back."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "journal")]
    received = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert received[0] == "the journal of stateful calls cannot be used: out of memory"
    assert "not a usable journal (out of memory)" in received[1]
