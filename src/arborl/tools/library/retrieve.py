"""Dense retrieval over a local corpus: documents near a query in an embedding space that you bring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arborl.errors import ConfigError
from arborl.registry import load
from arborl.tools.library.corpus import read_corpus
from arborl.tools.tool import Tool

Embed = Callable[[Sequence[str]], Any]
"""Texts to one row of numbers each."""


class Retrieve(Tool):
    """A tool that finds the documents nearest in meaning. Documents are embedded once, when the tool is made.

    Example:
        tool = Retrieve("wiki.jsonl", embed="my_package.vectors:embed")      # texts -> array, a row each
        tool = Retrieve("wiki.jsonl", embed="sentence-transformers/all-MiniLM-L6-v2")

    Args:
        corpus: a JSONL file (`text`, and where known `id` and `title`), a text file, or a folder of such files.
        embed: a function, `package.module:function`, or a model that the package sentence-transformers can load.
        top_k: most results of a query.
        chars: how much of a document is shown.
        timeout: seconds a query may take.
        max_tokens: length of an answer.
    """

    def __init__(
        self,
        corpus: str | Path,
        embed: str | Embed,
        top_k: int = 5,
        chars: int = 240,
        timeout: float = 30.0,
        max_tokens: int = 512,
    ):
        if top_k < 1:
            raise ValueError(f"top_k={top_k}: give 1 or more")
        self.top_k, self.chars = top_k, chars
        self.embed = _embedder(embed) if isinstance(embed, str) else embed
        self.documents = list(read_corpus(corpus))
        self.vectors_ND = unit([f"{one.title} {one.text}".strip() for one in self.documents], self.embed)
        self._one_at_a_time = threading.Lock()  # most embedding models are not made for several threads
        super().__init__(self.retrieve, timeout=timeout, max_tokens=max_tokens, max_chars=20_000)

    def retrieve(self, query: str) -> str:
        """Find documents about something, by meaning.

        Args:
            query: what they should be about, in a sentence.
        """
        with self._one_at_a_time:
            query_D = unit([query], self.embed)[0]
        nearness_N = self.vectors_ND @ query_D
        best = np.argsort(-nearness_N, kind="stable")[: self.top_k]
        return "\n".join(f"{rank}. {self._show(int(index))}" for rank, index in enumerate(best, start=1))

    def _show(self, index: int) -> str:
        one = self.documents[index]
        text = " ".join(one.text.split())
        shown = text if len(text) <= self.chars else f"{text[: self.chars]}…"
        return f"[{one.id}] {one.title + ': ' if one.title else ''}{shown}"


def unit(texts: Sequence[str], embed: Embed) -> np.ndarray:
    """Embeddings of length 1, so that a dot product compares directions."""
    rows = np.asarray(embed(texts), dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(texts) or not np.isfinite(rows).all():
        raise ValueError(f"embed gave {rows.shape} for {len(texts)} texts; return one row of finite numbers a text")
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _embedder(name: str) -> Embed:
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
