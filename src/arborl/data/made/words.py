"""The words of made documents: few and plain, so that a small tokenizer knows them all."""

from __future__ import annotations

import numpy as np


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


def filler(chance: np.random.Generator, tokens: int) -> list[str]:
    """Sentences that say nothing of anyone, of about so many words and signs together.

    Example:
        filler(generator(0, "x"), 12)      # ['The fox slept near the mill at noon.', …]
    """
    count = max(tokens // 9, 1)
    drawn = zip(*(chance.integers(len(words), size=count) for words in (OPENINGS, WHO, DID, PLACES, WHEN)), strict=True)
    said = [f"{OPENINGS[o]} {WHO[w]} {DID[d]} the {PLACES[p]} {WHEN[t]}." for o, w, d, p, t in drawn]
    left, kept = tokens, []
    for sentence in said:
        left -= sentence.count(" ") + 2
        kept.append(sentence)
        if left <= 0:
            break
    return kept
