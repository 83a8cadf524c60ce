"""Long documents with questions, generated from a seed.

A document is filler text about a village. A few sentences are the facts that a question needs, one per hop. Others are
facts of the same kind about other people (distractors), or mention the right names without a fact (lures).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from arborl.data.longbench import LETTERS, with_choices
from arborl.seeds import generator


def _words(text: str, between: str | None = None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(between))


PEOPLE = _words(
    """Anna Boris Clara David Edith Frank Greta Henry Irene Jonas Karin Lukas Maria Nils Olga Peter Quinn Rosa Simon
    Tilda Ursula Victor Wanda Xenia Yannis Zelda Arthur Bella Conrad Dora Emil Flora Gustav Hanna Igor Julia Kurt Linda
    Mira Norbert Otto Paula Ralph Sofia Tomas Vera Walter Yvonne"""
)
TOWNS = _words(
    """Alder Birch Cedar Dover Elmo Ferro Gorse Hazel Iver Juno Kelso Laurel Maple Nadir Oslo Porto Rowan Salem Tunis
    Umbra Velm Wells Yarrow Zurich"""
)
TRADES = _words(
    """baker carpenter doctor farmer fisher gardener hunter joiner lawyer mason miller painter pilot porter potter
    sailor singer smith tailor weaver writer"""
)
COLOURS = _words("red blue green white black golden silver brown yellow purple")
OBJECTS = _words("lamp key book ring cup clock box coin crown drum mirror sword map bell chair flute")
PLACES = _words("harbour market bridge tower garden mill church square forest river")

OPENINGS = _words("The A That One")
WHO = _words(
    "cat, dog, fox, old horse, wind, rain, snow, sun, moon, child, crowd, stranger, cook, guard, boat, cart", ","
)
DID = _words(
    """went past, slept near, waited at, came from, ran to, stood by, looked at, turned away from, was late for,
    rested at""",
    ",",
)
WHEN = _words(
    """in the morning, at noon, in the evening, at night, before dawn, after lunch, in spring, in winter, for an hour,
    again""",
    ",",
)


def filler(rng: np.random.Generator, tokens: int) -> list[str]:
    """Filler sentences of about `tokens` words and punctuation marks."""
    count = max(tokens // 9, 1)
    drawn = zip(*(rng.integers(len(words), size=count) for words in (OPENINGS, WHO, DID, PLACES, WHEN)), strict=True)
    sentences = [f"{OPENINGS[o]} {WHO[w]} {DID[d]} the {PLACES[p]} {WHEN[t]}." for o, w, d, p, t in drawn]
    left, chosen_sentences = tokens, []
    for sentence in sentences:
        left -= sentence.count(" ") + 2
        chosen_sentences.append(sentence)
        if left <= 0:
            break
    return chosen_sentences


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
    """One fact on the way to the answer."""

    subject: str
    """What to search for: `silver lamp`, `Mira`."""
    fact: str
    """The sentence in the document."""
    found: str
    """The subject of the next hop, or the answer."""


@dataclass(frozen=True, slots=True)
class DocumentProblem:
    """A document, a question about it, and the facts that answer it."""

    document: str
    question: str
    answer: str
    hops: tuple[Hop, ...]
    choices: tuple[str, ...] = ()
    """Four answers, one of them right; empty for open questions."""

    @property
    def letter(self) -> str:
        return LETTERS[self.choices.index(self.answer)] if self.choices else ""


def count_words(text: str) -> int:
    """Words and punctuation marks: about the number of tokens."""
    return sum(1 for _ in PIECE.finditer(text))


def make_document_problem(
    seed: int, tokens: int = 8000, hops: int = 2, distractors: int = 12, lures: int = 1, choices: bool = False
) -> DocumentProblem:
    """One document of about `tokens` words with a question of `hops` hops.

    Args:
        seed: determines everything.
        tokens: length of the document.
        hops: facts that lead to the answer, 1 to 6.
        distractors: facts of the same kinds about other people.
        lures: sentences per hop that mention its subject without a fact.
        choices: offer four answers.
    """
    if not 1 <= hops <= MOST_HOPS:
        raise ValueError(f"hops={hops}: give 1 to {MOST_HOPS}")
    if distractors < 0 or lures < 0:
        raise ValueError(f"distractors={distractors}, lures={lures}: give 0 or more")
    rng = generator(seed, "documents", tokens, hops)
    people = [PEOPLE[i] for i in rng.permutation(len(PEOPLE))]
    things = _things(rng, distractors + 1)
    chain, question, answers = _chain(rng, people, things[0], hops)
    sentences_to_insert = [hop.fact for hop in chain]
    sentences_to_insert += _others(rng, people[hops:], things[1:], answers, distractors)
    sentences_to_insert += [_lure(rng, hop.subject) for hop in chain for _ in range(lures)]
    text = _write(rng, sentences_to_insert, tokens)
    options_list = _choices(rng, chain[-1].found, answers) if choices else ()
    return DocumentProblem(text, question, chain[-1].found, tuple(chain), options_list)


def _chain(rng: Chance, people: list[str], thing: str, hops: int) -> tuple[list[Hop], str, tuple[str, ...]]:
    person, chain = people[0], []
    subject = person
    if hops > 1:
        chain.append(Hop(thing, _sentence(rng, KEEPS, person, thing), person))
        subject = f"the keeper of the {thing}"
    for next_one in people[1 : max(hops - 1, 1)]:
        chain.append(Hop(person, _sentence(rng, TEACHES, person, next_one), next_one))
        person, subject = next_one, f"the teacher of {subject}"
    if rng.random() < 0.5:
        town = _pick(rng, TOWNS)
        chain.append(Hop(person, _sentence(rng, LIVES, person, town), town))
        return chain, f"Where does {subject} live?", TOWNS
    trade = _pick(rng, TRADES)
    chain.append(Hop(person, _sentence(rng, WORKS, person, trade), trade))
    return chain, f"What is the trade of {subject}?", TRADES


def _others(rng: Chance, people: list[str], things: list[str], answers: tuple[str, ...], count: int) -> list[str]:
    sentences = []
    for number in range(count):
        one, two = (people[int(i)] for i in rng.choice(len(people), size=2, replace=False))
        facts = (
            _sentence(rng, KEEPS, one, things[number]),
            _sentence(rng, TEACHES, one, two),
            _sentence(rng, LIVES if answers is TOWNS else WORKS, one, _pick(rng, answers)),
        )
        sentences.append(facts[number % 3])
    return sentences


def _lure(rng: Chance, subject: str) -> str:
    name = subject if subject in PEOPLE else f"the {subject}"
    return _pick(rng, LURES).format(a=name, place=_pick(rng, PLACES))


def _write(rng: Chance, sentences_to_insert: list[str], tokens: int) -> str:
    """The sentences at random positions in filler text, in paragraphs."""
    room = tokens - sum(map(count_words, sentences_to_insert))
    sentences = filler(rng, room)
    places = np.sort(rng.integers(0, len(sentences) + 1, size=len(sentences_to_insert)))[::-1]
    for place, number in zip(places, rng.permutation(len(sentences_to_insert)), strict=True):
        sentences.insert(int(place), sentences_to_insert[int(number)])
    return "\n".join(" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6)) + "\n"


def _things(rng: Chance, count: int) -> list[str]:
    if count > len(COLOURS) * len(OBJECTS):
        raise ValueError(f"distractors={count - 1}: give at most {len(COLOURS) * len(OBJECTS) - 1}")
    drawn = rng.choice(len(COLOURS) * len(OBJECTS), size=count, replace=False)
    return [f"{COLOURS[int(i) % len(COLOURS)]} {OBJECTS[int(i) // len(COLOURS)]}" for i in drawn]


def _choices(rng: Chance, answer: str, answers: tuple[str, ...]) -> tuple[str, ...]:
    others = [one for one in answers if one != answer]
    options_list = [answer, *(others[int(i)] for i in rng.choice(len(others), size=3, replace=False))]
    return tuple(options_list[int(i)] for i in rng.permutation(4))


def _sentence(rng: Chance, ways: tuple[str, ...], a: str, b: str) -> str:
    return _pick(rng, ways).format(a=a, b=b)


def _pick(rng: Chance, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def make_documents(
    count: int,
    seed: int = 0,
    tokens: int | tuple[int, int] = (4000, 16000),
    hops: int | tuple[int, int] = 2,
    kind: str = "short",
    distractors: int = 12,
    lures: int = 1,
) -> list[Row]:
    """Rows for a file: question, answer, `document_content`. A function of its arguments.

    Args:
        count: rows.
        seed: determines all rows.
        tokens: length of each document, or the range it is drawn from.
        hops: facts a question needs, or the range.
        kind: `short` (the answer is a word) or `choice` (it is a letter, A to D).
        distractors, lures: see `make_document_problem`.
    """
    if kind not in ("short", "choice"):
        raise ValueError(f"kind={kind!r}: give short or choice")
    if count < 1:
        raise ValueError(f"count={count}: give 1 or more")
    rows = []
    for number in range(count):
        rng = generator(seed, "document row", number)
        size, steps = _within(rng, tokens, "tokens"), _within(rng, hops, "hops")
        problem_seed = int(rng.integers(1 << 62))
        problem = make_document_problem(problem_seed, size, steps, distractors, lures, choices=kind == "choice")
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
        "length": count_words(problem.document),
        "data_source": f"documents_{kind}",
        "document_content": problem.document,
    }


def _within(rng: Chance, bounds: int | tuple[int, int], name: str) -> int:
    low, high = (bounds, bounds) if isinstance(bounds, int) else bounds
    if not 1 <= low <= high:
        raise ValueError(f"{name}={bounds}: give a number, or two of which the first is not larger")
    return int(rng.integers(low, high + 1))
