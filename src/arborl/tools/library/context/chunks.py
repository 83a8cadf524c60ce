"""A long text cut into chunks of so many tokens, and a full-text index over them (SQLite's FTS5, in memory).

Chunks are exact slices of the text. Tokens are counted word by word, each different word once, so that a million
tokens take a second and any tokenizer will do; a chunk therefore never has more tokens than asked for, give or take
what a tokenizer merges across a space.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arborl.tools.injection import Tokens
from arborl.tools.output import count

PIECE = re.compile(r"\s*\S{1,24}|\s+")
"""White space and the word after it; a word without end (Chinese, base64) in parts."""
QUOTED = re.compile(r'^\s*"(.*)"\s*$', re.DOTALL)
SLOP = 2
"""Words that may stand between those of a keyword of several words."""
MARKS = ("\x02", "\x03")
SHELF_CHARS = 64_000_000
"""Text whose indices are kept for the next episode on the same document."""

Span = tuple[int, int]
Key = tuple[bytes, int, int, Tokens | None]


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that was found."""

    chunk: int
    score: float
    """BM25; larger is better."""
    marked: str
    """Its text, with `MARKS` around what matched."""


def cut_into_chunks(text: str, size: int, overlap: int, tokenizer: Tokens | None) -> tuple[list[Span], int]:
    """Where each chunk begins and ends in the text, and how many tokens the text has.

    Example:
        cut_into_chunks("one two three", 2, 0, None)      # ([(0, 7), (7, 13)], 3)
    """
    cost: dict[str, int] = {}
    ends, tokens = [0], [0]
    for piece in PIECE.finditer(text):
        word = piece.group()
        if word not in cost:
            cost[word] = max(count(word, tokenizer), 1)
        ends.append(piece.end())
        tokens.append(tokens[-1] + cost[word])
    return list(_spans(ends, tokens, size, overlap)), tokens[-1]


def _spans(ends: Sequence[int], tokens: Sequence[int], size: int, overlap: int) -> Iterator[Span]:
    """Greedy: each chunk takes words while they fit, one at least; the next begins `overlap` tokens before its end."""
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


class Index:
    """The chunks of one text. Read-only once made, so episodes on the same text share it."""

    def __init__(self, text: str, size: int, overlap: int, tokenizer: Tokens | None):
        self.text, self.size = text, size
        self.spans, self.tokens = cut_into_chunks(text, size, overlap, tokenizer)
        self._lock = threading.Lock()
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        self._base.execute("CREATE VIRTUAL TABLE chunks USING fts5(text, tokenize='porter unicode61')")
        rows = ((number, text[a:b]) for number, (a, b) in enumerate(self.spans))
        self._base.executemany("INSERT INTO chunks (rowid, text) VALUES (?, ?)", rows)

    def __len__(self) -> int:
        return len(self.spans)

    def content(self, chunk: int) -> str:
        begin, end = self.spans[chunk]
        return self.text[begin:end]

    def search(self, keywords: Sequence[str], mode: str, limit: int, marked: bool = True) -> tuple[int, list[Hit]]:
        """How many chunks match, and the best of them.

        Args:
            keywords: each a word or several; several stand together, in double quotes exactly so.
            mode: `or`, or `and` for chunks that match every keyword.
            limit: most hits.
            marked: also give their texts, with the matches marked.
        """
        expression = match_expression(keywords, mode)
        if not expression:
            return 0, []
        shown = "highlight(chunks, 0, ?, ?)" if marked else "? || ?"
        with self._lock:
            (total,) = self._base.execute("SELECT count(*) FROM chunks WHERE chunks MATCH ?", (expression,)).fetchone()
            rows = self._base.execute(  # by `rank` alone: with more to sort by, every match would be marked first
                f"SELECT rowid, -rank, {shown} FROM chunks WHERE chunks MATCH ? ORDER BY rank LIMIT ?",
                (*MARKS, expression, limit),
            ).fetchall()
        hits = [Hit(*row) for row in rows]
        return total, sorted(hits, key=lambda hit: (-hit.score, hit.chunk))


def match_expression(keywords: Sequence[str], mode: str = "or") -> str:
    """Keywords as an FTS5 query that cannot be wrong; empty where there is no word in them.

    Example:
        match_expression(["Mira", "silver lamp", '"by the sea"'])
        # '"Mira" OR NEAR("silver" "lamp", 2) OR "by the sea"'
    """
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
            terms.append(f"NEAR({near}, {SLOP + len(words) - 2})")
    return f" {mode.upper()} ".join(dict.fromkeys(terms))


def highlights(marked: str, size: int, most: int) -> list[str]:
    """Pieces of about `size` characters around what matched, at most so many, the matches in `<em>…</em>`.

    Example:
        highlights("far away \\x02Mira\\x03 lives in Oslo", 20, 1)      # ['away <em>Mira</em> lives in']
    """
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
    """The slice without the halves of words at its ends, and without half of a pair of marks."""
    piece = text[begin:end]
    if begin > 0 and not text[begin - 1].isspace():
        piece = re.sub(r"^[^\s\x02]+", "", piece)
    if end < len(text) and not text[end].isspace():
        piece = re.sub(r"[^\s\x03]+$", "", piece)
    opened, closed = piece.count(MARKS[0]), piece.count(MARKS[1])
    return piece + MARKS[1] if opened > closed else MARKS[0] + piece if closed > opened else piece


class Shelf:
    """Indices by what they are of, the latest used kept: the attempts at one task all read the same document."""

    def __init__(self, chars: int = SHELF_CHARS):
        self.chars = chars
        self._kept: OrderedDict[Key, Index] = OrderedDict()
        self._making: dict[Key, threading.Lock] = {}
        self._lock = threading.Lock()

    def index(self, text: str, size: int, overlap: int, tokenizer: Tokens | None) -> Index:
        """The index, made now if nobody asked for it before; those who ask meanwhile wait for it."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        key = (digest, size, overlap, tokenizer)
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            found = self._find(key)
            if found is None:
                found = Index(text, size, overlap, tokenizer)
                self._keep(key, found)
        return found

    def _find(self, key: Key) -> Index | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: Key, index: Index) -> None:
        with self._lock:
            self._kept[key] = index
            self._making.pop(key, None)
            while len(self._kept) > 1 and sum(len(one.text) for one in self._kept.values()) > self.chars:
                self._kept.popitem(last=False)


SHELF = Shelf()
