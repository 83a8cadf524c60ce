"""Transcripts of players who work through long documents, in exactly the form the context-managing agent shows.

The agent itself plays; a scripted player takes the model's place, so what is imitated cannot differ from what the model
will see. Players know where the answer is and are careless in their own ways: they search for the wrong thing, read the
wrong chunk, forget to delete until the window is full, copy wrong, or answer too soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from arborl.agents.statelm import StateLM
from arborl.chat.formats.hermes import HermesParser
from arborl.data.documents import Problem
from arborl.data.words import COLOURS, OBJECTS, PEOPLE, TOWNS, TRADES
from arborl.envs.documents import Documents
from arborl.errors import EpisodeOver
from arborl.types import Message, Metrics, Task, ToolCall, ToolSpec

if TYPE_CHECKING:
    from arborl.models.seedling.transcripts import Transcript

Chance = np.random.Generator

AGENT = {
    "toolset": ["searchEngine", "readChunk", "note", "deleteContext", "finish"],
    "form": "brief",
    "stub": "deleted",
    "tidy": True,
    "max_assistant_turns": 24,
    "reading": {"chunk_size": 272, "overlap": 16, "built": True, "results": 4, "fragments": 0},
}
"""Arguments of the agent, as the recipe has them."""
ENV = {"hops": 2, "distractors": 12, "lures": 1}
"""Arguments of the environment, besides the length."""
WINDOW, REPLY = 1024, 96
LONGEST = 900
"""Pieces of a transcript; a row of training holds 1024 tokens, and some words are two."""
LENGTHS = (1500, 16000)
PIECE = re.compile(r" ?[A-Z]?[a-z]+|\d|[A-Z]|\s|[^\sA-Za-z\d]")
NUMBER = re.compile(r"#(\d+) ")
CHUNKS = re.compile(r"chunks ([\d ]+)")


class Pieces:
    """Counts as seedling's tokenizer does before it joins letters."""

    def encode(self, text: str) -> list[int]:
        return [0] * sum(1 for _ in PIECE.finditer(text))


@dataclass(frozen=True, slots=True)
class Manner:
    """How a kind of player goes about it: each a chance, for every time it comes up."""

    share: float
    """Of the games."""
    right_word: float
    """Searches for the right thing."""
    right_chunk: float
    """Reads a chunk that was found, and one after the other."""
    notes: float
    deletes: float
    patience: float
    """Goes on to the next hop instead of guessing."""
    copies: float
    """Writes down what it read."""


MANNERS = {
    "careful": Manner(0.35, 0.97, 0.95, 0.95, 0.95, 0.98, 0.95),
    "hasty": Manner(0.20, 0.90, 0.85, 0.40, 0.60, 0.45, 0.80),
    "hoarder": Manner(0.20, 0.90, 0.90, 0.60, 0.10, 0.95, 0.90),
    "lost": Manner(0.25, 0.45, 0.50, 0.60, 0.60, 0.80, 0.60),
}


@dataclass(slots=True)
class Player:
    """Takes the model's place in one episode; `said` is every message with what it had been shown."""

    problem: Problem
    manner: Manner
    chance: Chance
    tokenizer: Pieces = field(default_factory=Pieces)
    said: list[tuple[tuple[Message, ...], Message]] = field(default_factory=list)
    hop: int = 0
    found: list[int] = field(default_factory=list)
    """Chunks of the last search that were not read yet."""
    wanted: str = "search"
    guess: str = ""

    def count(self, metrics: Metrics) -> None:
        """Nobody asks."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, stop: Sequence[str] = ()
    ) -> Message:
        text = self._next(messages[-1])
        reply = Message("assistant", text, tool_calls=HermesParser().parse(text), sampled=True)
        self.said.append((tuple(messages), reply))
        return reply

    def _next(self, last: Message) -> str:
        if self.wanted == "look":
            return self._look(last)
        if self.wanted == "results":
            listed = CHUNKS.search(last.content)
            self.found = [int(number) for number in listed.group(1).split()] if listed else []
            self.wanted = "read"
        return self._go_on()

    def _go_on(self) -> str:
        if self.hop == len(self.problem.hops):
            return self._finish(self.guess)
        if self.wanted == "read" and (self.found or not self._is(self.manner.right_chunk)):
            return self._read()
        return self._search()

    def _search(self) -> str:
        hop = self.problem.hops[self.hop]
        word = hop.subject if self._is(self.manner.right_word) else self._other(hop.subject)
        self.wanted = "results"
        return call("searchEngine", keyword=word)

    def _read(self) -> str:
        if self.found and self._is(self.manner.right_chunk):
            chunk = self.found.pop(0)
        else:
            chunk = int(self.chance.integers(0, 30))
        self.wanted = "look"
        return call("readChunk", chunk_id=chunk)

    def _look(self, last: Message) -> str:
        """A chunk was read: note what it says, let go of it, and go on."""
        hop = self.problem.hops[self.hop]
        seen = " ".join(hop.fact.split()) in " ".join(last.content.split())
        number = NUMBER.match(last.content)
        steps = []
        if seen:
            self.guess = hop.found if self._is(self.manner.copies) else self._other(hop.found)
            self.hop += 1
            self.wanted, self.found = "search", []
            if self.hop < len(self.problem.hops) and self._is(self.manner.notes):
                steps.append(call("note", key=hop.subject, summary=self.guess))
        else:
            self.wanted = "read" if self.found else "search"
        if number and self.hop < len(self.problem.hops) and self._is(self.manner.deletes):
            slip = 0 if self._is(0.97) else int(self.chance.integers(1, 4))
            steps.append(call("deleteContext", msg_id=int(number.group(1)) + slip))
        if not self._is(self.manner.patience):
            return self._finish(self.guess or self._other("Oslo"))
        if steps:
            return "".join(steps)
        return self._go_on()

    def _finish(self, answer: str) -> str:
        return call("finish", answer=answer or self._other("Oslo"))

    def _other(self, word: str) -> str:
        """Something else of the same kind."""
        for words in (PEOPLE, TOWNS, TRADES):
            if word in words:
                return self._pick(words)
        return f"{self._pick(COLOURS)} {self._pick(OBJECTS)}"

    def _pick(self, words: Sequence[str]) -> str:
        return words[int(self.chance.integers(len(words)))]

    def _is(self, share: float) -> bool:
        return bool(self.chance.random() < share)


def call(name: str, **arguments: object) -> str:
    return HermesParser().format(ToolCall("", name, dict(arguments)))


def play(chance: Chance, tokens: int, manner: Manner) -> tuple[Player, float]:
    """One episode: the player with all it said, and whether it answered right."""
    env = Documents(tokens=tokens, **ENV)  # type: ignore[arg-type]
    task = Task("document", seed=int(chance.integers(1 << 62)))
    agent = StateLM(**AGENT, max_model_len=WINDOW, single_turn_max_tokens=REPLY)  # type: ignore[arg-type]

    async def episode() -> Player:
        await env.reset(task, 0)
        assert env.problem is not None, "without data the environment makes a problem"
        player = Player(env.problem, manner, chance)
        with contextlib.suppress(EpisodeOver):
            await agent.run(task, env, player)
        return player

    return asyncio.run(episode()), env.metrics()["success"]


def documents(chance: Chance) -> Transcript:
    """One context of one episode, with the message that was its answer."""
    from arborl.models.seedling.transcripts import Transcript  # which lists this writer among its own

    kind = str(chance.choice(list(MANNERS), p=[manner.share for manner in MANNERS.values()]))
    low, high = np.log(LENGTHS)
    player, _ = play(chance, int(np.exp(chance.uniform(low, high))), MANNERS[kind])
    size = Pieces()
    short = [
        (shown, reply)
        for shown, reply in player.said
        if sum(len(size.encode(message.content)) + 6 for message in (*shown, reply)) <= LONGEST
    ]
    shown, reply = short[int(chance.integers(len(short)))] if short else player.said[0]
    return Transcript((*shown, reply))
