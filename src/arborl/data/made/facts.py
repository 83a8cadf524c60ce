"""A small world of people and what is true of them: documents to search, and questions that only they answer.

Every person lives in one town and is called after it (`Anna of Alder`), so a question names exactly one document.
"""

from __future__ import annotations

from typing import Any

from arborl.data.made.words import COLOURS, OBJECTS, PEOPLE, PLACES, TOWNS, TRADES
from arborl.seeds import generator

Row = dict[str, Any]
ASKED = "Answer as <answer>text</answer>."

KINDS: tuple[tuple[str, str, str], ...] = (
    ("trade", "{who} works as a {what}.", "What is the trade of {who}?"),
    ("thing", "{who} owns a {what}.", "What does {who} own?"),
    ("place", "{who} can be found at the {what}.", "Where can {who} be found?"),
    ("year", "{who} was born in {what}.", "In which year was {who} born?"),
)
"""What is known of a person: its name, how a document says it, how it is asked."""


def make_facts(count: int = 2000, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Questions and the documents that answer them, the same for the same arguments.

    Example:
        questions, documents = make_facts(10)
        questions[0]       # {"question": "What does Vera of Oslo own? …", "golden_answers": ["red lamp"], …}
        documents[0]       # {"id": "0", "title": "Vera of Oslo", "text": "Vera of Oslo works as a …"}
    """
    most = len(PEOPLE) * len(TOWNS) * len(KINDS)
    if not 1 <= count <= most:
        raise ValueError(f"count={count}: give 1 to {most}")
    people = [f"{person} of {town}" for town in TOWNS for person in PEOPLE]
    order = generator(seed, "facts", "people").permutation(len(people))
    chosen = [people[int(i)] for i in order[: -(-count // len(KINDS))]]
    questions: list[Row] = []
    documents: list[Row] = []
    for number, who in enumerate(chosen):
        known = _known(seed, who)
        text = " ".join(say.format(who=who, what=known[kind]) for kind, say, _ in KINDS)
        documents.append({"id": str(number), "title": who, "text": text})
        for kind, _, ask in KINDS:
            questions.append(
                {
                    "question": f"{ask.format(who=who)} {ASKED}",
                    "golden_answers": [known[kind]],
                    "answer": known[kind],
                    "query": f'"{who}" {kind}',
                    "data_source": "nq",
                }
            )
    mixed = generator(seed, "facts", "questions").permutation(len(questions))
    return [questions[int(i)] for i in mixed[:count]], documents


def _known(seed: int, who: str) -> dict[str, str]:
    chance = generator(seed, "facts", who)

    def pick(options: tuple[str, ...]) -> str:
        return options[int(chance.integers(len(options)))]

    return {
        "trade": pick(TRADES),
        "thing": f"{pick(COLOURS)} {pick(OBJECTS)}",
        "place": pick(PLACES),
        "year": str(int(chance.integers(1850, 2000))),
    }
