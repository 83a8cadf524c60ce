"""Chunks of a document and their full-text index (SQLite FTS5, in memory).

Chunks are slices of the text. Tokens are counted per distinct word, so that a million tokens take a second with any
tokenizer; the count ignores merges across spaces.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arborl.tools.core.tool_context import TokenEncoder, count_tokens

PIECE = re.compile(r"\s*\S{1,24}|\s+")  # white space and the following word; long words (Chinese, base64) in parts
QUOTED = re.compile(r'^\s*"(.*)"\s*$', re.DOTALL)
NEAR_DISTANCE = 2  # words allowed between the words of a keyword
MARKS = ("\x02", "\x03")
CACHE_CHARS = 64_000_000

Span = tuple[int, int]
Key = tuple[bytes, int, int, TokenEncoder | None]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A matching chunk."""

    chunk: int
    score: float  # BM25; larger is better
    marked: str


def cut_into_chunks(text: str, size: int, overlap: int, tokenizer: TokenEncoder | None) -> tuple[list[Span], int]:
    cost: dict[str, int] = {}
    ends, tokens = [0], [0]
    for piece in PIECE.finditer(text):
        word = piece.group()
        if word not in cost:
            cost[word] = max(count_tokens(word, tokenizer), 1)
        ends.append(piece.end())
        tokens.append(tokens[-1] + cost[word])
    return list(_spans(ends, tokens, size, overlap)), tokens[-1]


def _spans(ends: Sequence[int], tokens: Sequence[int], size: int, overlap: int) -> Iterator[Span]:
    """Greedy: each chunk takes words while they fit, at least one; the next starts `overlap` tokens before its end."""
    first, last = 0, len(ends) - 1
    while first < last:
        stop = first + 1
        while stop < last and tokens[stop + 1] - tokens[first] <= size:
            stop += 1
        yield ends[first], ends[stop]
        if stop == last:
            return
        back = stop
        while back > first + 1 and tokens[stop] - tokens[back - 1] <= overlap:
            back -= 1
        first = back


class DocumentIndex:
    """Chunks of one text; read-only, shared by episodes."""

    def __init__(self, text: str, size: int, overlap: int, tokenizer: TokenEncoder | None):
        self.text, self.size = text, size
        self.spans, self.tokens = cut_into_chunks(text, size, overlap, tokenizer)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE chunks USING fts5(text, tokenize='porter unicode61')")
        rows = ((number, text[a:b]) for number, (a, b) in enumerate(self.spans))
        self._database.executemany("INSERT INTO chunks (rowid, text) VALUES (?, ?)", rows)

    def __len__(self) -> int:
        return len(self.spans)

    def content(self, chunk: int) -> str:
        begin, end = self.spans[chunk]
        return self.text[begin:end]

    def search(self, keywords: Sequence[str], mode: str, most: int, marked: bool = True) -> tuple[int, list[SearchHit]]:
        expression = match_expression(keywords, mode)
        if not expression:
            return 0, []
        shown = "highlight(chunks, 0, ?, ?)" if marked else "? || ?"
        with self._lock:
            (total,) = self._database.execute(
                "SELECT count(*) FROM chunks WHERE chunks MATCH ?", (expression,)
            ).fetchone()
            rows = self._database.execute(  # ORDER BY rank alone: another key would highlight every match first
                f"SELECT rowid, -rank, {shown} FROM chunks WHERE chunks MATCH ? ORDER BY rank LIMIT ?",
                (*MARKS, expression, most),
            ).fetchall()
        hits = [SearchHit(*row) for row in rows]
        return total, sorted(hits, key=lambda hit: (-hit.score, hit.chunk))


def match_expression(keywords: Sequence[str], mode: str = "or") -> str:
    """A valid FTS5 query from keywords; empty without words."""
    terms = []
    for keyword in keywords:
        exact = QUOTED.match(keyword)
        words = re.findall(r"\w+", exact.group(1) if exact else keyword)
        if not words:
            continue
        if exact or len(words) == 1:
            terms.append(f'"{" ".join(words)}"')
        else:
            near = " ".join(f'"{word}"' for word in words)
            terms.append(f"NEAR({near}, {NEAR_DISTANCE + len(words) - 2})")
    return f" {mode.upper()} ".join(dict.fromkeys(terms))


def highlights(marked: str, size: int, most: int) -> list[str]:
    """Fragments of about `size` characters around matches, at most `most`, with the matches in `<em>…</em>`."""
    found: list[str] = []
    covered = 0
    for match in re.finditer(f"{MARKS[0]}[^{MARKS[1]}]*{MARKS[1]}", marked):
        if len(found) == most:
            break
        if match.start() < covered:
            continue
        side = max(size - (match.end() - match.start()), 0) // 2
        begin, covered = max(match.start() - side, 0), min(match.end() + side, len(marked))
        piece = _whole_words(marked, begin, covered)
        found.append(" ".join(piece.split()).replace(MARKS[0], "<em>").replace(MARKS[1], "</em>"))
    return found


def _whole_words(text: str, begin: int, end: int) -> str:
    piece = text[begin:end]
    if begin > 0 and not text[begin - 1].isspace():
        piece = re.sub(r"^[^\s\x02]+", "", piece)
    if end < len(text) and not text[end].isspace():
        piece = re.sub(r"[^\s\x03]+$", "", piece)
    opened, closed = piece.count(MARKS[0]), piece.count(MARKS[1])
    return piece + MARKS[1] if opened > closed else MARKS[0] + piece if closed > opened else piece


class IndexCache:
    """LRU cache of indices: all episodes of a task read the same document."""

    def __init__(self, chars: int = CACHE_CHARS):
        self.chars = chars
        self._entries: OrderedDict[Key, DocumentIndex] = OrderedDict()
        self._build_locks: dict[Key, threading.Lock] = {}
        self._lock = threading.Lock()

    def index(self, text: str, size: int, overlap: int, tokenizer: TokenEncoder | None) -> DocumentIndex:
        """The index, built at most once; concurrent callers wait."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        key = (digest, size, overlap, tokenizer)
        with self._lock:
            build_lock = self._build_locks.setdefault(key, threading.Lock())
        with build_lock:
            found = self._find(key)
            if found is None:
                found = DocumentIndex(text, size, overlap, tokenizer)
                self._store(key, found)
        return found

    def _find(self, key: Key) -> DocumentIndex | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def _store(self, key: Key, index: DocumentIndex) -> None:
        with self._lock:
            self._entries[key] = index
            self._build_locks.pop(key, None)
            while len(self._entries) > 1 and sum(len(one.text) for one in self._entries.values()) > self.chars:
                self._entries.popitem(last=False)


INDEX_CACHE = IndexCache()
