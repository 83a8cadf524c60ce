"""Full-text search over a local corpus: SQLite's FTS5, ranked by BM25, with the words that matched marked."""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from filelock import FileLock

from arborl.tools.library.corpus import fingerprint, read_corpus
from arborl.tools.tool import Tool

LAYOUT = 1
"""Part of an index's name: raise it when what is in an index changes."""
TERM = re.compile(r'"([^"]*)"|(\w+)')
MOST_TERMS = 64


class Search(Tool):
    """A tool that searches one corpus. Its index is made once and kept; a corpus that changed gets a new one.

    Example:
        tool = Search("wiki.jsonl", top_k=3)
        tool.search('"frozen lake" winter')
        # 1. [12] Lakes: a …[[frozen lake]] in [[winter]]…

    Args:
        corpus: a JSONL file (`text`, and where known `id` and `title`), a text file, or a folder of such files.
        top_k: most results of a query.
        words: length of what is shown of a document, around the words that matched.
        index: folder for the index; by default one in the user's cache.
        timeout: seconds a query may take.
        max_tokens: length of an answer.
    """

    def __init__(
        self,
        corpus: str | Path,
        top_k: int = 5,
        words: int = 32,
        index: str | Path | None = None,
        timeout: float = 10.0,
        max_tokens: int = 512,
    ):
        if not 1 <= top_k <= 100:
            raise ValueError(f"top_k={top_k}: give 1 to 100")
        if not 1 <= words <= 64:
            raise ValueError(f"words={words}: give 1 to 64, which is what FTS5 can show")
        self.top_k, self.words = top_k, words
        self.file = build_index(corpus, Path(index) if index is not None else cache_folder())
        super().__init__(self.search, timeout=timeout, max_tokens=max_tokens, max_chars=20_000)

    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: words to look for; put words in double quotes to find them together.
        """
        expression = match_expression(query)
        if not expression:
            return "The query has no words. Write what to look for."
        with closing(sqlite3.connect(f"{self.file.as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                "SELECT id, title, snippet(documents, 2, '[[', ']]', '…', ?) FROM documents "
                "WHERE documents MATCH ? ORDER BY bm25(documents, 0.0, 2.0, 1.0), rowid LIMIT ?",
                (self.words, expression, self.top_k),
            ).fetchall()
        if not rows:
            return f"Nothing found for {query!r}. Try fewer or other words."
        return "\n".join(
            f"{number}. [{name}] {title + ': ' if title else ''}{' '.join(shown.split())}"
            for number, (name, title, shown) in enumerate(rows, start=1)
        )


def match_expression(query: str) -> str:
    """Any text as an FTS5 query that cannot be wrong: phrases stay together, and a document needs one of the terms.

    Example:
        match_expression('"frozen lake" ice-cold AND')      # '"frozen lake" OR "ice" OR "cold" OR "AND"'
    """
    terms = []
    for phrase, word in TERM.findall(query)[:MOST_TERMS]:
        inside = " ".join(re.findall(r"\w+", phrase or word))
        if inside:
            terms.append(f'"{inside}"')
    return " OR ".join(dict.fromkeys(terms))


def build_index(corpus: str | Path, folder: Path) -> Path:
    """The index of `corpus` in `folder`, made now if it is not there; processes that want it at once make it once."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{fingerprint(corpus)}-{LAYOUT}.sqlite").resolve()
    with FileLock(f"{file}.lock"):
        if not file.exists():
            handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
            os.close(handle)
            try:
                _write(corpus, name)
                os.replace(name, file)  # complete or not there at all
            finally:
                Path(name).unlink(missing_ok=True)
    return file


def _write(corpus: str | Path, name: str) -> None:
    with closing(sqlite3.connect(name)) as connection, connection:
        connection.execute(
            "CREATE VIRTUAL TABLE documents USING fts5(id UNINDEXED, title, text, tokenize='porter unicode61')"
        )
        rows = ((one.id, one.title, one.text) for one in read_corpus(corpus))
        connection.executemany("INSERT INTO documents (id, title, text) VALUES (?, ?, ?)", rows)
        connection.execute("INSERT INTO documents (documents) VALUES ('optimize')")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "arborl" / "search"
