"""LongBench-v2, and NovelQA in its likeness: rows with the document beside the prompt, as Parquet files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError

Row = dict[str, Any]

LETTERS = "ABCD"
SELECT = "Select the best option from the choices above."
SHORT = "Answer in a few words."
SYSTEM = (
    "Answer the question about a document that you can only reach with tools. Keep your context small: take notes of "
    "what matters and delete messages you no longer need. Say first how you will proceed, then use the tools."
)
ABOUT = ("domain", "sub_domain", "difficulty", "length")


def with_choices(question: str, choices: Sequence[str]) -> str:
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False))
    return f"{question}\n{lines}\n{SELECT}"


def prepare_longbench(
    input: str | Path,
    out: str | Path,
    *,
    mc_to_sa: bool = False,
    val_share: float = 0.1,
    data_source: str = "long_context_mcq",
    agent_name: str = "statelm",
    system: str = SYSTEM,
) -> dict[str, int]:
    """Read LongBench-v2's JSON layout, write `train.parquet` and `val.parquet`; returns how many rows went where.

    Args:
        input: JSON list, JSONL, CSV or Parquet with `_id`, `question`, `choice_A` to `choice_D`, `answer`, `context`.
        out: folder for both files.
        mc_to_sa: ask for the text of the right choice instead of its letter; a row with `mc_to_sa: "true"` always does.
        val_share: share of the rows for validation, by a hash of their ids.
        data_source: what rows say of where they came from.
        agent_name: the agent that plays them.
        system: the system message.
    """

    def convert(row: Row, where: str) -> Row:
        choices = [_text(row, f"choice_{letter}", where) for letter in LETTERS]
        letter = _text(row, "answer", where).strip().upper()
        if letter not in LETTERS or len(letter) != 1:
            raise ConfigError(f"{where}, answer: {letter!r} is no choice. Write one of {', '.join(LETTERS)}.")
        short = mc_to_sa or str(row.get("mc_to_sa", "")).lower() == "true"
        right = choices[LETTERS.index(letter)]
        question, context = _text(row, "question", where), _text(row, "context", where)
        name = str(row.get("_id") or hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest())
        converted = _row(name, question, [] if short else choices, right if short else letter, context, system)
        converted |= {"data_source": data_source, "agent_name": agent_name, "answer_text": right}
        return converted | {key: str(row.get(key, "")) for key in ABOUT}

    return _prepare(Path(input), Path(out), convert, val_share, group="id")


def prepare_novelqa(
    input: str | Path,
    out: str | Path,
    books: str | Path,
    *,
    val_share: float = 0.1,
    data_source: str = "novelqa",
    agent_name: str = "statelm",
    system: str = SYSTEM,
) -> dict[str, int]:
    """As `prepare_longbench`, for rows that name a book: `book_id`, `question_id`, `question_type`, `question`,
    `options` (an object of letters, or a list) and `answer` (a letter, or text where there are no options).

    Args:
        books: folder with `<book_id>.txt`.
        val_share: share of the books for validation: no book is in both.
    """
    texts: dict[str, str] = {}

    def convert(row: Row, where: str) -> Row:
        book = _text(row, "book_id", where)
        if book not in texts:
            file = Path(books) / f"{book}.txt"
            if not file.is_file():
                raise ConfigError(f"{where}, book_id: there is no {file}. Put the book's text there.")
            texts[book] = file.read_text(encoding="utf-8", errors="replace")
        options = row.get("options") or []
        choices = [
            str(options[key]) for key in (sorted(options) if isinstance(options, Mapping) else range(len(options)))
        ]
        answer = _text(row, "answer", where).strip()
        if choices and answer.upper() not in LETTERS[: len(choices)]:
            raise ConfigError(f"{where}, answer: {answer!r} is none of {', '.join(LETTERS[: len(choices)])}.")
        about = {key: str(row.get(key, "")) for key in ("question_id", "question_type")} | {"book_id": book}
        name, gold = f"{book}/{about['question_id']}", answer.upper() if choices else answer
        right = choices[LETTERS.index(gold)] if choices else answer
        converted = _row(name, _text(row, "question", where), choices, gold, texts[book], system)
        return converted | about | {"data_source": data_source, "agent_name": agent_name, "answer_text": right}

    return _prepare(Path(input), Path(out), convert, val_share, group="book_id")


def _row(name: str, question: str, choices: list[str], gold: str, document: str, system: str) -> Row:
    """A row as the trainer reads it. The document is a column of its own: it never enters the prompt."""
    user = with_choices(question, choices) if choices else f"{question}\n{SHORT}"
    return {
        "id": name,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "answer": gold,
        "choices": choices,
        "ability": "long_context_reasoning",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "document_content": document,
    }


def _prepare(
    input: Path, out: Path, convert: Callable[[Row, str], Row], val_share: float, group: str
) -> dict[str, int]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    from arborl.data.reading.table_files import read_rows

    if not 0 <= val_share < 1:
        raise ConfigError(f"val_share={val_share}: give a share from 0 and below 1.")
    splits: dict[str, list[Row]] = {"train": [], "val": []}
    for place, row in read_rows(input):
        converted = convert(row, f"{input}, {place}")
        digest = hashlib.blake2b(str(converted[group]).encode(), digest_size=8).digest()
        splits["val" if int.from_bytes(digest, "big") < val_share * 2**64 else "train"].append(converted)
    if not splits["train"]:
        raise ConfigError(f"{input}: all {len(splits['val'])} rows fell to validation. Write a smaller val_share.")
    if not splits["val"] and val_share > 0 and len(splits["train"]) > 1:
        splits["val"].append(splits["train"].pop())  # a few rows only: one is better than none
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        if rows:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out / f"{split}.parquet")
    return {split: len(rows) for split, rows in splits.items()}


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    cell = row.get(column)
    if cell is None:
        raise ConfigError(f"{where}: no column {column!r}. It has: {', '.join(map(str, row))}.")
    if not isinstance(cell, str | int) or not str(cell).strip():
        raise ConfigError(f"{where}, {column}: empty, or not text.")
    return str(cell)
