"""Transcripts of players that work through long documents, in the form that the context-managing agent shows.

The agent itself runs; a scripted player answers in place of the model, so the prompts are those that the model sees.
Players know where the answer is and make mistakes: they search for the wrong word, read the wrong chunk, keep messages
until the window is full, copy wrong, or answer too early.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from arborl.agents.context.managed_conversation import SUMMARY_REQUEST
from arborl.agents.context.statelm import StateLM
from arborl.chat.formats.json_formats import HermesParser
from arborl.chat.messages import read_messages
from arborl.data.generated.document_problems import COLOURS, OBJECTS, PEOPLE, TOWNS, TRADES, DocumentProblem
from arborl.envs.games.documents_env import Documents
from arborl.errors import EpisodeLimitReached
from arborl.seedling.transcript_base import PIECE, SPECIAL_STRINGS, Transcript, draw, pick
from arborl.types import Message, Metrics, Task, ToolCall, ToolSpec

AGENT = {
    "toolset": ["searchEngine", "readChunk", "note", "deleteContext", "finish"],
    "form": "brief",
    "stub": "deleted",
    "tidy": True,
    "max_assistant_turns": 24,
    "reading": {"chunk_size": 360, "overlap": 16, "built": True, "results": 4, "fragments": 0},
}
"""Arguments of the agent in recipes/statelm."""
SUMMARIES = {"policy": "summary", "toolset": ["searchEngine", "readChunk", "finish"]}
"""Changes for the summary policy."""
ENV = {"hops": 2, "distractors": 12, "lures": 1}
"""Arguments of the environment, apart from the length."""
WINDOW, REPLY = 1024, 96
LONGEST = 1000
"""Most pieces of a transcript: a training row has 1024 tokens, and some words are two tokens."""
LENGTHS = (1500, 16000)
PIECES = re.compile("|".join([*map(re.escape, SPECIAL_STRINGS), PIECE]))
NUMBER = re.compile(r"#(\d+) ")
CHUNK = re.compile(r"(?:#\d+ )?(\d+): ")
CHUNKS = re.compile(r"chunks ([\d ]+)")


class PieceTokenizer:
    """Approximates seedling's tokenizer: every word is one token."""

    def encode(self, text: str) -> list[int]:
        return [0] * sum(1 for _ in PIECES.finditer(text))


@dataclass(frozen=True, slots=True)
class PlayerStyle:
    """Probabilities of one kind of player."""

    share: float
    """Of the episodes."""
    right_word: float
    """Searches for the right word."""
    right_chunk: float
    """Reads the chunks that were found, in order."""
    notes: float
    deletes: float
    patience: float
    """Continues with the next hop instead of guessing."""
    copies: float
    """Copies what it read without an error."""


STYLES = {
    "careful": PlayerStyle(0.28, 0.97, 0.97, 0.95, 0.95, 0.98, 0.97),
    "hasty": PlayerStyle(0.12, 0.90, 0.85, 0.40, 0.30, 0.45, 0.85),
    "hoarder": PlayerStyle(0.50, 0.95, 0.95, 0.05, 0.03, 0.95, 0.92),
    "lost": PlayerStyle(0.10, 0.50, 0.60, 0.60, 0.30, 0.80, 0.70),
}
"""Hoarders, the largest group, keep what they have read until the window is full."""


@dataclass(slots=True)
class DocumentPlayer:
    """Answers in place of the model. `replies` holds each prompt and its reply."""

    problem: DocumentProblem
    style: PlayerStyle
    rng: Generator
    tokenizer: PieceTokenizer = field(default_factory=PieceTokenizer)
    replies: list[tuple[tuple[Message, ...], Message]] = field(default_factory=list)
    hop: int = 0
    unread: list[int] = field(default_factory=list)
    """Chunks of the last search that were not read yet."""
    last_chunk: int = -1
    """Index of the chunk that was read last."""
    wanted: str = "search"
    guess: str = ""

    def count(self, metrics: Metrics) -> None:
        """Part of the model's interface; unused."""

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        *,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> Message:
        messages = read_messages(messages, "messages")
        text = self._summarize(messages[-2]) if messages[-1].content == SUMMARY_REQUEST else self._next(messages[-1])
        reply = Message("assistant", text, tool_calls=HermesParser().parse(text), sampled=True)
        self.replies.append((tuple(messages), reply))
        return reply

    def _next(self, last: Message) -> str:
        if self.wanted == "look":
            return self._process_chunk(last)
        if self.wanted == "results":
            self._store_results(last)
        return self._continue()

    def _store_results(self, last: Message) -> None:
        listed = CHUNKS.search(last.content)
        self.unread = [int(number) for number in listed.group(1).split()] if listed else []
        self.wanted = "read"

    def _continue(self) -> str:
        if self.hop == len(self.problem.hops):
            return self._finish(self.guess)
        if self.wanted == "read" and (self.unread or not self._chance(self.style.right_chunk)):
            return self._read()
        return self._search()

    def _search(self) -> str:
        hop = self.problem.hops[self.hop]
        word = hop.subject if self._chance(self.style.right_word) else self._other(hop.subject)
        self.wanted = "results"
        return call("searchEngine", keyword=word)

    def _read(self) -> str:
        if self.unread and self._chance(self.style.right_chunk):
            chunk = self.unread.pop(0)
        else:
            chunk = int(self.rng.integers(0, 30))
        self.wanted, self.last_chunk = "look", chunk
        return call("readChunk", chunk_id=chunk)

    def _process_chunk(self, last: Message) -> str:
        """After a chunk was read: write a note, delete the message, continue."""
        hop = self.problem.hops[self.hop]
        number = NUMBER.match(last.content)
        steps = []
        if self._store_fact(last) and self.hop < len(self.problem.hops) and self._chance(self.style.notes):
            steps.append(call("note", key=hop.subject, summary=self.guess))
        if number and self.hop < len(self.problem.hops) and self._chance(self.style.deletes):
            slip = 0 if self._chance(0.97) else int(self.rng.integers(1, 4))
            steps.append(call("deleteContext", msg_id=int(number.group(1)) + slip))
        if not self._chance(self.style.patience):
            return self._finish(self.guess or self._other("Oslo"))
        return "".join(steps) or self._continue()

    def _store_fact(self, last: Message) -> bool:
        """Whether the chunk holds the fact of this hop; if so, store it, sometimes with an error."""
        hop = self.problem.hops[self.hop]
        seen = " ".join(hop.fact.split()) in " ".join(last.content.split())
        if seen:
            self.guess = hop.found if self._chance(self.style.copies) else self._other(hop.found)
            self.hop += 1
            self.unread = []
        self.wanted = "read" if self.unread else "search"
        return seen

    def _summarize(self, last: Message) -> str:
        """The summary that the agent requests. The last tool result may not have been processed yet."""
        chunk = CHUNK.match(last.content)
        if self.wanted == "look" and chunk and int(chunk.group(1)) == self.last_chunk:
            self._store_fact(last)
        elif self.wanted == "results" and CHUNKS.match(last.content):
            self._store_results(last)
        known = f"{self.problem.hops[self.hop - 1].subject}: {self.guess}." if self.hop else "Nothing found."
        tried = f" Chunks {' '.join(map(str, self.unread))} are left." if self.unread else ""
        return known + tried

    def _finish(self, answer: str) -> str:
        return call("finish", answer=answer or self._other("Oslo"))

    def _other(self, word: str) -> str:
        for words in (PEOPLE, TOWNS, TRADES):
            if word in words:
                return pick(self.rng, words)
        return f"{pick(self.rng, COLOURS)} {pick(self.rng, OBJECTS)}"

    def _chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)


def call(name: str, **arguments: object) -> str:
    return HermesParser().format(ToolCall("", name, dict(arguments)))


def play_document(
    rng: Generator, tokens: int, style: PlayerStyle, summaries: bool = False
) -> tuple[DocumentPlayer, float]:
    """One episode: the player, and 1.0 if its answer was correct."""
    env = Documents(tokens=tokens, **ENV)  # type: ignore[arg-type]
    task = Task("document", seed=int(rng.integers(1 << 62)))
    arguments = AGENT | (SUMMARIES if summaries else {})
    agent = StateLM(**arguments, max_model_len=WINDOW, single_turn_max_tokens=REPLY)  # type: ignore[arg-type]

    async def episode() -> DocumentPlayer:
        await env.reset(task, 0)
        assert env.problem is not None, "without data the environment makes a problem"
        player = DocumentPlayer(env.problem, style, rng)
        with contextlib.suppress(EpisodeLimitReached):
            await agent.run(task, env, player)
        return player

    return asyncio.run(episode()), env.metrics()["success"]


def documents(rng: Generator) -> list[Transcript]:
    """One transcript per context of an episode; a context ends where the agent edits it."""
    kind = draw(rng, {name: style.share for name, style in STYLES.items()})
    low, high = np.log(LENGTHS)
    style, summaries = STYLES[kind], bool(rng.random() < 0.25)
    if summaries:
        style = replace(style, notes=0.0, deletes=0.0)
    player, _ = play_document(rng, int(np.exp(rng.uniform(low, high))), style, summaries)
    counts = PieceTokenizer().encode
    return [
        one
        for one in branches(player.replies)
        if sum(len(counts(message.content)) + 6 for message in one.messages) <= LONGEST
    ]


def branches(replies: Sequence[tuple[tuple[Message, ...], Message]]) -> list[Transcript]:
    """The contexts of an episode; each is trained on the replies that were written in it."""
    out: list[Transcript] = []
    for shown, reply in replies:
        whole = (*shown, reply)
        if out and whole[: len(out[-1].messages)] == tuple(out[-1].messages):
            out[-1] = Transcript(whole, train_from=out[-1].train_from)
        else:
            out.append(Transcript(whole, train_from=len(shown)))
    return out
