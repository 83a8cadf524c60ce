"""Conversations as turns and exchanges, and language-independent measures of text."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from arborl.types import Episode, Message, Role, Task, Turn

ROLES = ("system", "user", "assistant", "tool")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One message of a conversation.

    Example:
        ConversationTurn(role="assistant", content="Your parcel is on its way.", reward=0.8)
    """

    role: str
    content: str
    reward: float | None = None
    """Reward of this turn, if known."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role={self.role!r}: give one of {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user message and the reply to it."""

    user: str
    """Empty if the assistant wrote first."""
    reply: str
    """Without thinking and tool calls; may be empty."""


def turns_of(episode: Episode) -> list[ConversationTurn]:
    turns = [as_turn(message) for message in episode.opening]
    for turn in episode.turns:
        turns.append(as_turn(turn.message, turn.reward))
        turns += [as_turn(message) for message in turn.observation]
    return turns


def as_turn(message: Message, reward: float | None = None) -> ConversationTurn:
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return ConversationTurn(message.role, message.content, reward, {"tool_calls": calls} if calls else {})


def as_turns(turns: Sequence[ConversationTurn | Mapping[str, Any]]) -> list[ConversationTurn]:
    """Turns; messages in OpenAI's format (`{"role": "user", "content": "Hello"}`) are converted."""
    return [
        ConversationTurn(str(turn.get("role")), str(turn.get("content") or "")) if isinstance(turn, Mapping) else turn
        for turn in turns
    ]


def episode_of(turns: Sequence[ConversationTurn], fields: Mapping[str, Any]) -> Episode:
    starts = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    messages = [Message(cast(Role, turn.role), turn.content) for turn in turns]
    opening = tuple(messages[: starts[0]] if starts else messages)
    episode = Episode("conversation", Task("conversation", opening, fields), opening=opening)
    for start, end in zip(starts, [*starts[1:], len(turns)], strict=False):
        episode.turns.append(Turn(messages[start], tuple(messages[start + 1 : end]), turns[start].reward or 0.0))
    return episode


def exchanges(turns: Sequence[ConversationTurn]) -> list[Exchange]:
    """The conversation as pairs of user message and reply, without a final user message that has no reply."""
    pairs: list[Exchange] = []
    user: list[str] = []
    replies: list[str] | None = None
    for turn in turns:
        if turn.role == "user":
            if replies is not None:
                pairs.append(Exchange("\n".join(user), "\n".join(replies)))
                user, replies = [], None
            user.append(turn.content)
        elif turn.role == "assistant":
            reply = "" if turn.metadata.get("tool_calls") else without_thinking(turn.content)
            replies = [*(replies or []), *([reply] if reply else [])]
    if replies is not None:
        pairs.append(Exchange("\n".join(user), "\n".join(replies)))
    return pairs


def without_thinking(text: str) -> str:
    """A reply without its thinking; empty if the thinking does not end."""
    text = text.rpartition(THINK_CLOSE)[2]
    return text.partition(THINK_OPEN)[0].strip()


# ------------------------------------------------------------------------------------------------ measures

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana and Han: written without spaces, so each character counts as a word."""
WORD = re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])\w)+(?:['’](?:(?![{UNSPACED}])\w)+)*")
CHARACTER = re.compile(rf"[{UNSPACED}]")
SENTENCE = re.compile(r"[.!?。！？؟।…]+(?=\s|$)|[。！？؟।]+|\n+")
QUESTION = re.compile(r"[?？؟\u037e]\s*$")
LATIN = re.compile(r"[a-z\u00c0-\u024f]")
WINDOW = 25
MAX_CHARS = 20_000
"""Characters of a text that are measured: about 3500 words."""


def words(text: str) -> list[str]:
    """Lower-case words; a character of a script without spaces is one."""
    return WORD.findall(unicodedata.normalize("NFKC", text[:MAX_CHARS]).casefold())


def content_words(text: str | Sequence[str]) -> set[str]:
    """Words of four letters or more, numbers, and characters of scripts without spaces."""
    tokens = words(text) if isinstance(text, str) else text
    return {word for word in tokens if len(word) > 3 or any(c.isdigit() for c in word) or CHARACTER.match(word)}


def length(text: str) -> float:
    """Number of words; two characters of a script without spaces count as one."""
    return sum(0.5 if CHARACTER.match(word) else 1.0 for word in words(text))


def sentences(text: str) -> list[str]:
    text, parts, start = text[:MAX_CHARS], [], 0
    for end in [*(match.end() for match in SENTENCE.finditer(text)), len(text)]:
        if sentence := text[start:end].strip():
            parts.append(sentence)
        start = end
    return parts


def without_code(text: str) -> str:
    """The text outside of ``` fences; an open fence extends to the end."""
    return "\n".join(text.split("```")[::2])


def lexical_variety(tokens: Sequence[str]) -> float:
    """1 in ordinary prose, 0 for one word repeated.

    The mean share of distinct words in a sliding window of 25, which does not depend on the length; 0.4 to 0.8 maps to
    0 to 1 (0.2 to 0.6 for scripts without spaces). Times the share of distinct trigrams, 0 to 0.6, which finds repeated
    sentences.
    """
    if len(tokens) < 4:
        return 1.0 if len(tokens) < 2 or len(set(tokens)) > 1 else 0.0
    size = min(WINDOW, len(tokens))
    window_counts = Counter(tokens[:size])
    different = [len(window_counts)]
    for old, new in zip(tokens, tokens[size:], strict=False):
        window_counts[new] += 1
        window_counts[old] -= 1
        if not window_counts[old]:
            del window_counts[old]
        different.append(len(window_counts))
    runs = [tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)]
    least = 0.2 if sum(bool(CHARACTER.match(word)) for word in tokens) * 2 > len(tokens) else 0.4
    near = _clamp((sum(different) / len(different) / size - least) / 0.4)
    return near * _clamp(len(set(runs)) / len(runs) / 0.6)


def function_word_score(tokens: Sequence[str]) -> float:
    """1 in prose, 0 for a list of keywords.

    Prose in Latin letters has function words (`the`, `zu`, `de`). It is 1 if one word in eight has at most three
    letters; one is free, for short sentences. Other scripts get 1.
    """
    latin = [word for word in tokens if LATIN.match(word)]
    if len(latin) * 2 <= len(tokens):
        return 1.0
    return _clamp(8 * (1 + sum(len(word) <= 3 for word in latin)) / len(latin))


def prose_score(text: str) -> float:
    tokens = words(without_code(text))
    return lexical_variety(tokens) * function_word_score(tokens)


def word_ngrams(text: str, size: int = 3) -> set[tuple[str, ...]]:
    """N-grams of words. A shorter text is one n-gram."""
    tokens = words(text)
    return {tuple(tokens[i : i + size]) for i in range(max(len(tokens) - size + 1, 1))} if tokens else set()


def jaccard(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return len(one & other) / len(one | other) if one and other else 0.0


def novelty_scores(exchanges: Sequence[Exchange], size: int = 3) -> list[float]:
    """Of each reply: 1 - its largest similarity to the user message or an earlier reply."""
    user = [word_ngrams(one.user, size) for one in exchanges]
    replies = [word_ngrams(one.reply, size) for one in exchanges]
    return [
        1.0 - max(jaccard(ngrams, other) for other in (user[i], *replies[:i])) if ngrams else 0.0
        for i, ngrams in enumerate(replies)
    ]


def is_echo(reply: str, user: str) -> bool:
    """Whether a reply of three words or more has only words of the user."""
    tokens = words(reply)
    return len(tokens) > 2 and not set(tokens) - set(words(user))


def has_question(reply: str, user: str = "") -> bool:
    """Whether the reply has a question of three words or more that is not a sentence of the user."""
    user_sentences = {" ".join(words(sentence)) for sentence in sentences(user)}
    for sentence in sentences(without_code(reply)):
        tokens = words(sentence)
        if (
            len(tokens) > 2
            and QUESTION.search(sentence)
            and lexical_variety(tokens) > 0.5
            and " ".join(tokens) not in user_sentences
        ):
            return True
    return False


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)
