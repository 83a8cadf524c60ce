"""Full-text search (SQLite FTS5, BM25) and dense retrieval over a local corpus."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from arborl.errors import ConfigError
from arborl.registry import load
from arborl.tools.core.tool import Tool

TEXT_FILES = (".txt", ".md")
TEXT_KEYS = ("text", "contents", "content")


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    id: str
    title: str
    text: str


def read_corpus(path: str | Path) -> Iterator[CorpusDocument]:
    """Documents of a JSONL file (`text`, optionally `id` and `title`), a text file, or a folder of such files."""
    for file in corpus_files(path):
        if file.suffix == ".jsonl":
            yield from _read_lines(file)
        else:
            yield CorpusDocument(file.stem, file.stem.replace("_", " "), file.read_text("utf-8", errors="replace"))


def corpus_files(path: str | Path) -> list[Path]:
    root = Path(path)
    found = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    files = [file for file in found if file.suffix in (".jsonl", *TEXT_FILES)]
    if not root.exists() or not files:
        raise ConfigError(f"{path}: no corpus. Give a .jsonl or text file, or a folder of these.")
    return files


def fingerprint(path: str | Path) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for file in corpus_files(path):
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _read_lines(file: Path) -> Iterator[CorpusDocument]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{file}, line {number + 1}: not valid JSON: {error}") from error
            text = next((row[key] for key in TEXT_KEYS if key in row), None) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise ConfigError(f'{file}, line {number + 1}: no text. Write {{"id": …, "title": …, "text": "…"}}.')
            yield CorpusDocument(str(row.get("id", number)), str(row.get("title", "")), text)


INDEX_VERSION = 1
TERM = re.compile(r'"([^"]*)"|(\w+)')
MAX_TERMS = 64


class Search(Tool):
    """Full-text search over a corpus. The index is built once and stored; a changed corpus gets a new one.

    Example:
        tool = Search("wiki.jsonl", top_k=3)
        tool.search('"frozen lake" winter')
        # 1. [12] Lakes: a …[[frozen lake]] in [[winter]]…

    Args:
        corpus: a JSONL file (`text`, optionally `id` and `title`), a text file, or a folder of such files.
        top_k: maximum number of results.
        words: length of a snippet around the matches.
        index: folder of the index; by default in the user's cache.
        timeout: seconds per query.
        max_tokens: maximum tokens of a result.
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
            raise ValueError(f"words={words}: give 1 to 64 (limit of FTS5)")
        self.top_k, self.words = top_k, words
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.file = build_index(corpus, cache / "arborl" / "search" if index is None else Path(index))
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
    """A valid FTS5 query from any text: quoted phrases stay together, terms are joined by OR."""
    terms = []
    for phrase, word in TERM.findall(query)[:MAX_TERMS]:
        inside = " ".join(re.findall(r"\w+", phrase or word))
        if inside:
            terms.append(f'"{inside}"')
    return " OR ".join(dict.fromkeys(terms))


def build_index(corpus: str | Path, folder: Path) -> Path:
    """The index of `corpus` in `folder`, built if missing; concurrent processes build it once."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{fingerprint(corpus)}-{INDEX_VERSION}.sqlite").resolve()
    with FileLock(f"{file}.lock"):
        if not file.exists():
            handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
            os.close(handle)
            try:
                _write(corpus, name)
                os.replace(name, file)  # atomic
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


EmbeddingFunction = Callable[[Sequence[str]], Any]


class Retrieve(Tool):
    """Dense retrieval. Documents are embedded once, when the tool is created.

    Example:
        tool = Retrieve("wiki.jsonl", embed="my_package.vectors:embed")      # texts -> array, a row each
        tool = Retrieve("wiki.jsonl", embed="sentence-transformers/all-MiniLM-L6-v2")

    Args:
        corpus: a JSONL file (`text`, optionally `id` and `title`), a text file, or a folder of such files.
        embed: a function, `package.module:function`, or a model of the package sentence-transformers.
        top_k: maximum number of results.
        chars: characters shown per document.
        timeout: seconds per query.
        max_tokens: maximum tokens of a result.
    """

    def __init__(
        self,
        corpus: str | Path,
        embed: str | EmbeddingFunction,
        top_k: int = 5,
        chars: int = 240,
        timeout: float = 30.0,
        max_tokens: int = 512,
    ):
        if top_k < 1:
            raise ValueError(f"top_k={top_k}: give 1 or more")
        self.top_k, self.chars = top_k, chars
        self.embed = _load_embedding(embed) if isinstance(embed, str) else embed
        self.documents = list(read_corpus(corpus))
        self.vectors_ND = unit_vectors([f"{one.title} {one.text}".strip() for one in self.documents], self.embed)
        self._lock = threading.Lock()  # most embedding models are not thread-safe
        super().__init__(self.retrieve, timeout=timeout, max_tokens=max_tokens, max_chars=20_000)

    def retrieve(self, query: str) -> str:
        """Find documents about something, by meaning.

        Args:
            query: what they should be about, in a sentence.
        """
        with self._lock:
            query_D = unit_vectors([query], self.embed)[0]
        similarity_N = self.vectors_ND @ query_D
        best = np.argsort(-similarity_N, kind="stable")[: self.top_k]
        return "\n".join(f"{rank}. {self._show(int(index))}" for rank, index in enumerate(best, start=1))

    def _show(self, index: int) -> str:
        one = self.documents[index]
        text = " ".join(one.text.split())
        shown = text if len(text) <= self.chars else f"{text[: self.chars]}…"
        return f"[{one.id}] {one.title + ': ' if one.title else ''}{shown}"


def unit_vectors(texts: Sequence[str], embed: EmbeddingFunction) -> np.ndarray:
    rows = np.asarray(embed(texts), dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(texts) or not np.isfinite(rows).all():
        raise ValueError(
            f"embed returned shape {rows.shape} for {len(texts)} texts; return one row of finite numbers per text"
        )
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _load_embedding(name: str) -> EmbeddingFunction:
    if ":" in name:
        return load(name, "embedding function")  # type: ignore[no-any-return]
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ConfigError(
            f"embed={name}: the package sentence-transformers is not installed. Run `pip install "
            "sentence-transformers`, or give your own function as embed=package.module:function."
        ) from None
    return SentenceTransformer(name).encode  # type: ignore[no-any-return]
