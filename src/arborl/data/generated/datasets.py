"""Generated data sets: what `arborl data make` writes. They need no download, and every answer is computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from arborl.data.generated.document_problems import COLOURS, OBJECTS, PEOPLE, PLACES, TOWNS, TRADES, make_documents
from arborl.data.generated.problems import code_problems, problems
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import call_checked
from arborl.seeds import generator

Row = dict[str, Any]
TEXT_ANSWER = "Answer as <answer>text</answer>."

FACT_KINDS: tuple[tuple[str, str, str], ...] = (
    ("trade", "{who} works as a {what}.", "What is the trade of {who}?"),
    ("thing", "{who} owns a {what}.", "What does {who} own?"),
    ("place", "{who} can be found at the {what}.", "Where can {who} be found?"),
    ("year", "{who} was born in {what}.", "In which year was {who} born?"),
)
"""Facts of a person: name, sentence in the document, question."""


def make_facts(count: int = 2000, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Questions and the documents that answer them, the same for the same arguments."""
    most = len(PEOPLE) * len(TOWNS) * len(FACT_KINDS)
    if not 1 <= count <= most:
        raise ValueError(f"count={count}: give 1 to {most}")
    people = [f"{person} of {town}" for town in TOWNS for person in PEOPLE]
    order = generator(seed, "facts", "people").permutation(len(people))
    chosen = [people[int(i)] for i in order[: -(-count // len(FACT_KINDS))]]
    questions: list[Row] = []
    documents: list[Row] = []
    for number, person_name in enumerate(chosen):
        known = _known(seed, person_name)
        text = " ".join(say.format(who=person_name, what=known[kind]) for kind, say, _ in FACT_KINDS)
        documents.append({"id": str(number), "title": person_name, "text": text})
        for kind, _, ask in FACT_KINDS:
            questions.append(
                {
                    "question": f"{ask.format(who=person_name)} {TEXT_ANSWER}",
                    "golden_answers": [known[kind]],
                    "answer": known[kind],
                    "query": f'"{person_name}" {kind}',
                    "data_source": "nq",
                }
            )
    mixed = generator(seed, "facts", "questions").permutation(len(questions))
    return [questions[int(i)] for i in mixed[:count]], documents


def _known(seed: int, person_name: str) -> dict[str, str]:
    rng = generator(seed, "facts", person_name)

    def pick(options: tuple[str, ...]) -> str:
        return options[int(rng.integers(len(options)))]

    return {
        "trade": pick(TRADES),
        "thing": f"{pick(COLOURS)} {pick(OBJECTS)}",
        "place": pick(PLACES),
        "year": str(int(rng.integers(1850, 2000))),
    }


# ------------------------------------------------------------------------------------------------ data sets

Files = dict[str, list[Row]]
"""Rows by the name of the file they belong in."""


def arithmetic(count: int = 2000, seed: int = 0, level: int = 1) -> Files:
    """Word problems with one operation (level 1), two (2), or division and percent too (3)."""
    return {"arithmetic.json": problems(count, seed, level)}


def gsm8k(count: int = 2000, seed: int = 0, level: int = 1) -> Files:
    """Word problems in the two columns of GSM8K as AgentFly has it, `question` and `answer`; a tenth for testing."""
    rows = [{"question": row["question"], "answer": row["answer"]} for row in problems(count, seed, level)]
    tenth = max(count // 10, 1)
    return {"gsm8k_train.json": rows[tenth:], "gsm8k_test.json": rows[:tenth]}


def code(count: int = 2000, seed: int = 0, kind: str = "compute") -> Files:
    """Problems that code solves: `compute` an answer, write a `function`, write a `program`; with TACO's tests."""
    return {"code.json": [_taco(row) for row in code_problems(count, seed, kind)]}


def facts(count: int = 2000, seed: int = 0) -> Files:
    """Questions about people, in the columns of Natural Questions, and the corpus to search."""
    questions, documents = make_facts(count, seed)
    return {"facts.json": questions, "corpus.jsonl": documents}


def documents(
    count: int = 200, seed: int = 0, tokens: int | list[int] = 8000, hops: int | list[int] = 2, kind: str = "short"
) -> Files:
    """Long documents with planted facts, and questions about them."""
    size = tokens if isinstance(tokens, int) else (tokens[0], tokens[1])
    steps = hops if isinstance(hops, int) else (hops[0], hops[1])
    return {"documents.jsonl": make_documents(count, seed, size, steps, kind)}


def mixed(count: int = 2000, seed: int = 0) -> Files:
    """Code in TACO's columns, search in Natural Questions', math in MATH's; and the corpus to search."""
    questions, corpus = make_facts(count, seed)
    return {
        **code(count, seed),
        "search.json": questions,
        "corpus.jsonl": corpus,
        "math.json": [_math(row) for row in problems(count, seed)],
    }


def _taco(row: Row) -> Row:
    """With the tests in TACO's form: inputs and outputs of a program, or arguments and values of a function."""
    tests = row.get("tests") or [{"input": "", "output": row["answer"]}]
    if "function" in tests[0]:
        files = {
            "fn_name": tests[0]["function"],
            "inputs": [test["args"] for test in tests],
            "outputs": [[test["returns"]] for test in tests],
        }
    else:
        files = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    return row | {"input_output": json.dumps(files), "data_source": "taco"}


def _math(row: Row) -> Row:
    solution = f"We compute {row['expression']} = \\boxed{{{row['answer']}}}."
    about = {"level": f"Level {row['level']}", "type": "Prealgebra", "data_source": "math"}
    return {"problem": row["question"], "solution": solution, **about}


GENERATORS: dict[str, Callable[..., Files]] = {
    one.__name__: one for one in (arithmetic, gsm8k, code, facts, documents, mixed)
}


def make(
    name: str, folder: Path, more: Mapping[str, Callable[..., Files]] | None = None, **settings: Any
) -> dict[Path, int]:
    """Write a set into a folder; returns how many rows went into each file. `more` are makers besides those here."""
    makers = {**GENERATORS, **(more or {})}
    if name not in makers:
        known = ", ".join(makers)
        raise ConfigError(f"no set is called {name!r}.{did_you_mean(name, makers)} Known: {known}.")
    files = call_checked(makers[name], settings, name)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for file, rows in files.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = "\n".join(lines) if file.endswith(".jsonl") else "[\n" + ",\n".join(lines) + "\n]"
        (folder / file).write_text(text + "\n", encoding="utf-8")
        written[folder / file] = len(rows)
    return written
