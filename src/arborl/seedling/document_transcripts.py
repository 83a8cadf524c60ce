"""Transcripts of players who work through long documents, in exactly the form the context-managing agent shows.

The agent itself plays; a scripted player takes the model's place, so what is imitated cannot differ from what the model
will see. Players know where the answer is and are careless in their own ways: they search for the wrong thing, read the
wrong chunk, forget to delete until the window is full, copy wrong, or answer too soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from arborl.agents.context.policy import ASK
from arborl.agents.context.statelm import StateLM
from arborl.chat.formats.hermes import HermesParser
from arborl.chat.messages import read_messages
from arborl.data.made.documents import DocumentProblem
from arborl.data.made.words import COLOURS, OBJECTS, PEOPLE, TOWNS, TRADES
from arborl.envs.documents import Documents
from arborl.errors import EpisodeLimitReached
from arborl.seedling.transcript import MARKS, PIECE, Chance, Transcript, draw, pick
from arborl.types import Message, Metrics, Task, ToolCall, ToolSpec

AGENT = {
    "toolset": ["searchEngine", "readChunk", "note", "deleteContext", "finish"],
    "form": "brief",
    "stub": "deleted",
    "tidy": True,
    "max_assistant_turns": 24,
    "reading": {"chunk_size": 360, "overlap": 16, "built": True, "results": 4, "fragments": 0},
}
"""Arguments of the agent, as the recipe has them."""
SUMMARIES = {"policy": "summary", "toolset": ["searchEngine", "readChunk", "finish"]}
"""Changes where the agent asks for summaries instead."""
ENV = {"hops": 2, "distractors": 12, "lures": 1}
"""Arguments of the environment, besides the length."""
WINDOW, REPLY = 1024, 96
LONGEST = 1000
"""Pieces of a transcript; a row of training holds 1024 tokens, and some words are two."""
LENGTHS = (1500, 16000)
PIECES = re.compile("|".join([*map(re.escape, MARKS), PIECE]))
NUMBER = re.compile(r"#(\d+) ")
CHUNK = re.compile(r"(?:#\d+ )?(\d+): ")
CHUNKS = re.compile(r"chunks ([\d ]+)")


class Pieces:
    """Counts as seedling's tokenizer does, were every word one token."""

    def encode(self, text: str) -> list[int]:
        return [0] * sum(1 for _ in PIECES.finditer(text))


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
    "careful": Manner(0.50, 0.97, 0.97, 0.95, 0.95, 0.98, 0.97),
    "hasty": Manner(0.15, 0.90, 0.85, 0.40, 0.60, 0.45, 0.85),
    "hoarder": Manner(0.20, 0.92, 0.92, 0.60, 0.20, 0.95, 0.92),
    "lost": Manner(0.15, 0.50, 0.60, 0.60, 0.60, 0.80, 0.70),
}


@dataclass(slots=True)
class Player:
    """Takes the model's place in one episode; `said` is every message with what it had been shown."""

    problem: DocumentProblem
    manner: Manner
    chance: Chance
    tokenizer: Pieces = field(default_factory=Pieces)
    said: list[tuple[tuple[Message, ...], Message]] = field(default_factory=list)
    hop: int = 0
    found: list[int] = field(default_factory=list)
    """Chunks of the last search that were not read yet."""
    open: int = -1
    """The chunk that was read last."""
    wanted: str = "search"
    guess: str = ""

    def count(self, metrics: Metrics) -> None:
        """Nobody asks."""

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        *,
        stop: str | Sequence[str] = (),
    ) -> Message:
        messages = read_messages(messages, "messages")
        text = self._sum_up(messages[-2]) if messages[-1].content == ASK else self._next(messages[-1])
        reply = Message("assistant", text, tool_calls=HermesParser().parse(text), sampled=True)
        self.said.append((tuple(messages), reply))
        return reply

    def _next(self, last: Message) -> str:
        if self.wanted == "look":
            return self._look(last)
        if self.wanted == "results":
            self._list(last)
        return self._go_on()

    def _list(self, last: Message) -> None:
        """A search was answered."""
        listed = CHUNKS.search(last.content)
        self.found = [int(number) for number in listed.group(1).split()] if listed else []
        self.wanted = "read"

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
        self.wanted, self.open = "look", chunk
        return call("readChunk", chunk_id=chunk)

    def _look(self, last: Message) -> str:
        """A chunk was read: note what it says, let go of it, and go on."""
        hop = self.problem.hops[self.hop]
        number = NUMBER.match(last.content)
        steps = []
        if self._take_in(last) and self.hop < len(self.problem.hops) and self._is(self.manner.notes):
            steps.append(call("note", key=hop.subject, summary=self.guess))
        if number and self.hop < len(self.problem.hops) and self._is(self.manner.deletes):
            slip = 0 if self._is(0.97) else int(self.chance.integers(1, 4))
            steps.append(call("deleteContext", msg_id=int(number.group(1)) + slip))
        if not self._is(self.manner.patience):
            return self._finish(self.guess or self._other("Oslo"))
        if steps:
            return "".join(steps)
        return self._go_on()

    def _take_in(self, last: Message) -> bool:
        """Whether a chunk says what this hop is about; if so, it is known, rightly or wrongly."""
        hop = self.problem.hops[self.hop]
        seen = " ".join(hop.fact.split()) in " ".join(last.content.split())
        if seen:
            self.guess = hop.found if self._is(self.manner.copies) else self._other(hop.found)
            self.hop += 1
            self.found = []
        self.wanted = "read" if self.found else "search"
        return seen

    def _sum_up(self, last: Message) -> str:
        """What is known so far, when the agent asks for it; it may leave the latest round out of what it shows."""
        chunk = CHUNK.match(last.content)
        if self.wanted == "look" and chunk and int(chunk.group(1)) == self.open:
            self._take_in(last)
        elif self.wanted == "results" and CHUNKS.match(last.content):
            self._list(last)
        known = f"{self.problem.hops[self.hop - 1].subject}: {self.guess}." if self.hop else "Nothing found."
        tried = f" Chunks {' '.join(map(str, self.found))} are left." if self.found else ""
        return known + tried

    def _finish(self, answer: str) -> str:
        return call("finish", answer=answer or self._other("Oslo"))

    def _other(self, word: str) -> str:
        """Something else of the same kind."""
        for words in (PEOPLE, TOWNS, TRADES):
            if word in words:
                return pick(self.chance, words)
        return f"{pick(self.chance, COLOURS)} {pick(self.chance, OBJECTS)}"

    def _is(self, share: float) -> bool:
        return bool(self.chance.random() < share)


def call(name: str, **arguments: object) -> str:
    return HermesParser().format(ToolCall("", name, dict(arguments)))


def play(chance: Chance, tokens: int, manner: Manner, summaries: bool = False) -> tuple[Player, float]:
    """One episode: the player with all it said, and whether it answered right."""
    env = Documents(tokens=tokens, **ENV)  # type: ignore[arg-type]
    task = Task("document", seed=int(chance.integers(1 << 62)))
    given = AGENT | (SUMMARIES if summaries else {})
    agent = StateLM(**given, max_model_len=WINDOW, single_turn_max_tokens=REPLY)  # type: ignore[arg-type]

    async def episode() -> Player:
        await env.reset(task, 0)
        assert env.problem is not None, "without data the environment makes a problem"
        player = Player(env.problem, manner, chance)
        with contextlib.suppress(EpisodeLimitReached):
            await agent.run(task, env, player)
        return player

    return asyncio.run(episode()), env.metrics()["success"]


def documents(chance: Chance) -> list[Transcript]:
    """Every context of one episode as it was before the next edit, with the messages that were written in it."""
    kind = draw(chance, {name: manner.share for name, manner in MANNERS.items()})
    low, high = np.log(LENGTHS)
    manner, summaries = MANNERS[kind], bool(chance.random() < 0.25)
    if summaries:
        manner = replace(manner, notes=0.0, deletes=0.0)
    player, _ = play(chance, int(np.exp(chance.uniform(low, high))), manner, summaries)
    return [one for one in branches(player.said) if _size(one.messages) <= LONGEST]


def branches(said: Sequence[tuple[tuple[Message, ...], Message]]) -> list[Transcript]:
    """The contexts of an episode, each with what it began with and all that was said until it was edited."""
    out: list[Transcript] = []
    for shown, reply in said:
        whole = (*shown, reply)
        if out and whole[: len(out[-1].messages)] == tuple(out[-1].messages):
            out[-1] = Transcript(whole, since=out[-1].since)
        else:
            out.append(Transcript(whole, since=len(shown)))
    return out


def _size(messages: Sequence[Message]) -> int:
    return sum(len(Pieces().encode(message.content)) + 6 for message in messages)
