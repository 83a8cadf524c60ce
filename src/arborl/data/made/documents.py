"""Long documents with questions: made from a seed, with planted facts.

A made document is pages of small talk about a village. A few sentences in it are facts that a question needs, one a
hop; others are facts of the same kind about other people (distractors), or mention the right names and say nothing
(lures).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from arborl.data.made.words import COLOURS, OBJECTS, PEOPLE, PLACES, TOWNS, TRADES, filler
from arborl.data.public.longbench import LETTERS, with_choices
from arborl.seeds import generator

Chance = np.random.Generator
Row = dict[str, Any]

PIECE = re.compile(r"\w+|[^\w\s]")
KEEPS = ("{a} keeps the {b}.", "The {b} is kept by {a}.")
TEACHES = ("The teacher of {a} is {b}.", "{b} is the teacher of {a}.")
LIVES = ("{a} lives in {b}.", "The home of {a} is in {b}.")
WORKS = ("{a} works as a {b}.", "The trade of {a} is {b}.")
LURES = (
    "{a} was seen near the {place} in the morning.",
    "Nobody spoke of {a} that day.",
    "Someone at the {place} asked about {a}.",
    "A song about {a} was heard at the {place}.",
)
MOST_HOPS = 6


@dataclass(frozen=True, slots=True)
class Hop:
    """One step towards the answer."""

    subject: str
    """What one must look for: `silver lamp`, `Mira`."""
    fact: str
    """The sentence in the document that says it."""
    found: str
    """What it says: the next hop's subject, or the answer."""


@dataclass(frozen=True, slots=True)
class DocumentProblem:
    """A document, a question about it, and the way to its answer."""

    document: str
    question: str
    answer: str
    hops: tuple[Hop, ...]
    choices: tuple[str, ...] = ()
    """Four possible answers, the right one among them; empty where none are offered."""

    @property
    def letter(self) -> str:
        """Which choice is right."""
        return LETTERS[self.choices.index(self.answer)] if self.choices else ""


def length(text: str) -> int:
    """Words and signs: about the tokens of a tokenizer that knows the words."""
    return sum(1 for _ in PIECE.finditer(text))


def make_problem(
    seed: int, tokens: int = 8000, hops: int = 2, distractors: int = 12, lures: int = 1, choices: bool = False
) -> DocumentProblem:
    """One document of about `tokens` words and signs with a question of so many hops.

    Args:
        seed: decides all of it.
        tokens: length of the document.
        hops: facts that lead to the answer, 1 to 6.
        distractors: facts of the same kinds about others.
        lures: sentences a hop that mention its subject and say nothing about it.
        choices: offer four answers.
    """
    if not 1 <= hops <= MOST_HOPS:
        raise ValueError(f"hops={hops}: give 1 to {MOST_HOPS}")
    if distractors < 0 or lures < 0:
        raise ValueError(f"distractors={distractors}, lures={lures}: give 0 or more")
    chance = generator(seed, "documents", tokens, hops)
    people = [PEOPLE[i] for i in chance.permutation(len(PEOPLE))]
    things = _things(chance, distractors + 1)
    chain, question, answers = _chain(chance, people, things[0], hops)
    planted = [hop.fact for hop in chain]
    planted += _others(chance, people[hops:], things[1:], answers, distractors)
    planted += [_lure(chance, hop.subject) for hop in chain for _ in range(lures)]
    text = _write(chance, planted, tokens)
    offered = _choices(chance, chain[-1].found, answers) if choices else ()
    return DocumentProblem(text, question, chain[-1].found, tuple(chain), offered)


def _chain(chance: Chance, people: list[str], thing: str, hops: int) -> tuple[list[Hop], str, tuple[str, ...]]:
    """The facts of the question, the question, and what its answer might be."""
    who, chain = people[0], []
    asked = who
    if hops > 1:
        chain.append(Hop(thing, _say(chance, KEEPS, who, thing), who))
        asked = f"the keeper of the {thing}"
    for next_one in people[1 : max(hops - 1, 1)]:
        chain.append(Hop(who, _say(chance, TEACHES, who, next_one), next_one))
        who, asked = next_one, f"the teacher of {asked}"
    if chance.random() < 0.5:
        town = _pick(chance, TOWNS)
        chain.append(Hop(who, _say(chance, LIVES, who, town), town))
        return chain, f"Where does {asked} live?", TOWNS
    trade = _pick(chance, TRADES)
    chain.append(Hop(who, _say(chance, WORKS, who, trade), trade))
    return chain, f"What is the trade of {asked}?", TRADES


def _others(chance: Chance, people: list[str], things: list[str], answers: tuple[str, ...], count: int) -> list[str]:
    """True things about people who are no part of the question."""
    said = []
    for number in range(count):
        one, two = (people[int(i)] for i in chance.choice(len(people), size=2, replace=False))
        facts = (
            _say(chance, KEEPS, one, things[number]),
            _say(chance, TEACHES, one, two),
            _say(chance, LIVES if answers is TOWNS else WORKS, one, _pick(chance, answers)),
        )
        said.append(facts[number % 3])
    return said


def _lure(chance: Chance, subject: str) -> str:
    name = subject if subject in PEOPLE else f"the {subject}"
    return _pick(chance, LURES).format(a=name, place=_pick(chance, PLACES))


def _write(chance: Chance, planted: list[str], tokens: int) -> str:
    """The planted sentences, anywhere in so much small talk, in paragraphs."""
    room = tokens - sum(map(length, planted))
    sentences = filler(chance, room)
    places = np.sort(chance.integers(0, len(sentences) + 1, size=len(planted)))[::-1]
    for place, number in zip(places, chance.permutation(len(planted)), strict=True):
        sentences.insert(int(place), planted[int(number)])
    return "\n".join(" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6)) + "\n"


def _things(chance: Chance, count: int) -> list[str]:
    if count > len(COLOURS) * len(OBJECTS):
        raise ValueError(f"distractors={count - 1}: give at most {len(COLOURS) * len(OBJECTS) - 1}")
    drawn = chance.choice(len(COLOURS) * len(OBJECTS), size=count, replace=False)
    return [f"{COLOURS[int(i) % len(COLOURS)]} {OBJECTS[int(i) // len(COLOURS)]}" for i in drawn]


def _choices(chance: Chance, answer: str, answers: tuple[str, ...]) -> tuple[str, ...]:
    others = [one for one in answers if one != answer]
    offered = [answer, *(others[int(i)] for i in chance.choice(len(others), size=3, replace=False))]
    return tuple(offered[int(i)] for i in chance.permutation(4))


def _say(chance: Chance, ways: tuple[str, ...], a: str, b: str) -> str:
    return _pick(chance, ways).format(a=a, b=b)


def _pick(chance: Chance, options: tuple[str, ...]) -> str:
    return options[int(chance.integers(len(options)))]


def make_documents(
    count: int,
    seed: int = 0,
    tokens: int | tuple[int, int] = (4000, 16000),
    hops: int | tuple[int, int] = 2,
    kind: str = "short",
    distractors: int = 12,
    lures: int = 1,
) -> list[Row]:
    """Rows for a file, the same for the same arguments: question, answer, `document_content` and how it is answered.

    Args:
        count: rows.
        seed: decides all of them.
        tokens: length of each document, or the range it is drawn from.
        hops: facts a question needs, or the range.
        kind: `short` (the answer is a word) or `choice` (it is a letter, A to D).
        distractors, lures: see `make_problem`.

    Example:
        make_documents(1, tokens=500)
        # [{"id": "documents-0-0", "question": "Where does the keeper of the silver lamp live?", "answer": "Velm", …}]
    """
    if kind not in ("short", "choice"):
        raise ValueError(f"kind={kind!r}: give short or choice")
    if count < 1:
        raise ValueError(f"count={count}: give 1 or more")
    rows = []
    for number in range(count):
        chance = generator(seed, "document row", number)
        size, steps = _within(chance, tokens, "tokens"), _within(chance, hops, "hops")
        own = int(chance.integers(1 << 62))
        problem = make_problem(own, size, steps, distractors, lures, choices=kind == "choice")
        rows.append(_row(f"documents-{seed}-{number}", problem, kind))
    return rows


def _row(name: str, problem: DocumentProblem, kind: str) -> Row:
    chosen = kind == "choice"
    return {
        "id": name,
        "question": with_choices(problem.question, problem.choices) if chosen else problem.question,
        "answer": problem.letter if chosen else problem.answer,
        "answer_text": problem.answer,
        "choices": list(problem.choices),
        "hops": len(problem.hops),
        "length": length(problem.document),
        "data_source": f"documents_{kind}",
        "document_content": problem.document,
    }


def _within(chance: Chance, given: int | tuple[int, int], name: str) -> int:
    low, high = (given, given) if isinstance(given, int) else given
    if not 1 <= low <= high:
        raise ValueError(f"{name}={given}: give a number, or two of which the first is not larger")
    return int(chance.integers(low, high + 1))
