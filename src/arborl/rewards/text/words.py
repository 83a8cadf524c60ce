"""Words of any language, and what can be counted about them. No list of words here: those are in the rewards."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from arborl.rewards.text.turns import Exchange

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana and Han: written without spaces, so a sign is taken for a word."""
WORD = re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])\w)+(?:['’](?:(?![{UNSPACED}])\w)+)*")
SIGN = re.compile(rf"[{UNSPACED}]")
SENTENCE = re.compile(r"[.!?。！？؟।…]+(?=\s|$)|[。！？؟।]+|\n+")
QUESTION = re.compile(r"[?？؟\u037e]\s*$")
LATIN = re.compile(r"[a-z\u00c0-\u024f]")
WINDOW = 25
MAX_CHARS = 20_000
"""Of a text, whose words and sentences are counted: about 3500 words, far beyond what any reward here calls long."""


def words(text: str) -> list[str]:
    """Words in small letters; a sign of a script without spaces is one.

    Example:
        words("Don't panic: 東京!")      # ["don't", 'panic', '東', '京']
    """
    return WORD.findall(unicodedata.normalize("NFKC", text[:MAX_CHARS]).casefold())


def telling(text: str | Sequence[str]) -> set[str]:
    """Words that may carry content: four letters or more, or a number, or a sign of a script without spaces."""
    given = words(text) if isinstance(text, str) else text
    return {word for word in given if len(word) > 3 or any(c.isdigit() for c in word) or SIGN.match(word)}


def length(text: str) -> float:
    """In words; two signs of a script without spaces are about one."""
    return sum(0.5 if SIGN.match(word) else 1.0 for word in words(text))


def sentences(text: str) -> list[str]:
    """Sentences, with the marks at their ends."""
    text, found, start = text[:MAX_CHARS], [], 0
    for end in [*(match.end() for match in SENTENCE.finditer(text)), len(text)]:
        if sentence := text[start:end].strip():
            found.append(sentence)
        start = end
    return found


def without_code(text: str) -> str:
    """What stands outside of ``` fences; one that is never closed goes to the end."""
    return "\n".join(text.split("```")[::2])


def variety(given: Sequence[str]) -> float:
    """How little the words repeat each other: 1 in ordinary prose, 0 for one word again and again.

    The mean share of different words among any 25 in a row: other than over the whole text, it does not fall with
    length. From 0.4 to 0.8 it rises from 0 to 1. A script without spaces repeats its signs, so there 0.2 to 0.6.
    Times the share of different runs of three words, from 0 to 0.6: whole sentences again and again are found by it.
    """
    if len(given) < 4:
        return 1.0 if len(given) < 2 or len(set(given)) > 1 else 0.0
    size = min(WINDOW, len(given))
    seen = Counter(given[:size])
    different = [len(seen)]
    for gone, new in zip(given, given[size:], strict=False):
        seen[new] += 1
        seen[gone] -= 1
        if not seen[gone]:
            del seen[gone]
        different.append(len(seen))
    runs = [tuple(given[i : i + 3]) for i in range(len(given) - 2)]
    least = 0.2 if sum(bool(SIGN.match(word)) for word in given) * 2 > len(given) else 0.4
    near = _clamp((sum(different) / len(different) / size - least) / 0.4)
    return near * _clamp(len(set(runs)) / len(runs) / 0.6)


def linked(given: Sequence[str]) -> float:
    """Whether words are joined to sentences: 1 in prose, 0 for a list of catchwords.

    Prose in Latin letters has short words (`the`, `zu`, `de`). With one in eight of at most three letters it is 1; one
    is given away, so that a short sentence may have none. Other scripts are taken for prose.
    """
    latin = [word for word in given if LATIN.match(word)]
    if len(latin) * 2 <= len(given):
        return 1.0
    return _clamp(8 * (1 + sum(len(word) <= 3 for word in latin)) / len(latin))


def prose(text: str) -> float:
    """`variety` times `linked`, of what is no code."""
    given = words(without_code(text))
    return variety(given) * linked(given)


def shingles(text: str, size: int = 3) -> set[tuple[str, ...]]:
    """Runs of words. A text of fewer is one run."""
    given = words(text)
    return {tuple(given[i : i + size]) for i in range(max(len(given) - size + 1, 1))} if given else set()


def alike(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    """Share of the runs of both that are in both (Jaccard): 1 for equal texts."""
    return len(one & other) / len(one | other) if one and other else 0.0


def fresh(said: Sequence[Exchange], size: int = 3) -> list[float]:
    """Of each reply, 1 less how alike it is to the user's message, or to an earlier reply, whichever is more."""
    asked = [shingles(one.asked, size) for one in said]
    replied = [shingles(one.reply, size) for one in said]
    return [
        1.0 - max(alike(mine, other) for other in (asked[i], *replied[:i])) if mine else 0.0
        for i, mine in enumerate(replied)
    ]


def parrots(reply: str, asked: str) -> bool:
    """Whether a reply of three words or more has no word that the user did not say."""
    given = words(reply)
    return len(given) > 2 and not set(given) - set(words(asked))


def asks(reply: str, asked: str = "") -> bool:
    """Whether there is a question of the reply's own: three words or more, varied, and no sentence of the user's."""
    theirs = {" ".join(words(sentence)) for sentence in sentences(asked)}
    for sentence in sentences(without_code(reply)):
        given = words(sentence)
        if len(given) > 2 and QUESTION.search(sentence) and variety(given) > 0.5 and " ".join(given) not in theirs:
            return True
    return False


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)
