"""Documents out of files: what `search` and `retrieve` look through."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from arborl.errors import ConfigError

TEXT_FILES = (".txt", ".md")
TEXT_KEYS = ("text", "contents", "content")


@dataclass(frozen=True, slots=True)
class Document:
    """One thing that can be found."""

    id: str
    title: str
    text: str


def read_corpus(path: str | Path) -> Iterator[Document]:
    """The documents of a JSONL file (`text`, and where known `id` and `title`), a text file, or a folder of such files.

    Example:
        list(read_corpus("wiki.jsonl"))      # [Document("0", "Anarchism", "Anarchism is …"), …]
    """
    for file in corpus_files(path):
        if file.suffix == ".jsonl":
            yield from _read_lines(file)
        else:
            yield Document(file.stem, file.stem.replace("_", " "), file.read_text(encoding="utf-8", errors="replace"))


def corpus_files(path: str | Path) -> list[Path]:
    """The files a corpus is made of, sorted."""
    place = Path(path)
    found = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
    files = [file for file in found if file.suffix in (".jsonl", *TEXT_FILES)]
    if not place.exists() or not files:
        raise ConfigError(f"{path}: no corpus there. Give a .jsonl or text file, or a folder with some.")
    return files


def fingerprint(path: str | Path) -> str:
    """Changes when a file of the corpus does: by their names, sizes and times."""
    digest = hashlib.blake2b(digest_size=12)
    for file in corpus_files(path):
        about = file.stat()
        digest.update(f"{file.resolve()}\0{about.st_size}\0{about.st_mtime_ns}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _read_lines(file: Path) -> Iterator[Document]:
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
            yield Document(str(row.get("id", number)), str(row.get("title", "")), text)
