"""One choice of an answer while it is written: what may be shown of it, and the tool calls it ends with."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from arborl.chat.formats import Parser
from arborl.chat.renderer import Renderer
from arborl.serve.source import Likely, Refused, Saying, Source, Unavailable
from arborl.serve.text import Detokenizer, Until
from arborl.types import FinishReason, Message, ToolCall, ToolSpec

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class Heard:
    """A sampled token."""

    id: int
    logprob: float
    top: Likely = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice."""

    text: str = ""
    tokens: tuple[Heard, ...] = ()
    """Those behind it, and those behind what is held back: each is told once."""
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Manner:
    """How completions are read."""

    stops: tuple[str, ...] = ()
    """Texts that end one, and are no part of it."""
    parser: Parser | None = None
    """Reads tool calls; none where there are no tools."""
    begins: str = ""
    """What the model was given of the answer."""
    one_call: bool = False


class Choice:
    """Reads a completion as it comes.

    Args:
        index: among the choices.
        saying: the completion.
        source: whose it is.
        manner: how it is read.
    """

    def __init__(self, index: int, saying: Saying, source: Source, manner: Manner):
        self.index, self.saying, self.source, self.manner = index, saying, source, manner
        self.ids: list[int] = []
        """All that was sampled."""
        self.text = ""
        """All that was shown."""
        self.calls: tuple[ToolCall, ...] = ()
        self.finish = ""
        self.version = source.version
        self._words, self._stop = Detokenizer(source.renderer), Until(manner.stops)
        opens = () if manner.parser is None else getattr(manner.parser, "opens", None)
        self._call, self._silent = Until(opens or ()), opens is None
        """Where a call may begin; without a word for that, all is held until it can be read."""
        self._whole = manner.begins
        self._untold: list[Heard] = []

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new, again and again; the last one has `finish`."""
        given = "" if self._silent else self._call.add(self.manner.begins)
        async with aclosing(aiter(self.saying)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self.ids += piece.tokens
                likely = piece.top or ((),) * len(piece.tokens)
                for token, logprob, top in zip(piece.tokens, piece.logprobs, likely, strict=True):
                    if self._stop.found is None and token not in self.source.renderer.stop:
                        self._untold.append(Heard(token, logprob, top))
                text, given = given + self._read(piece.tokens), ""
                if piece.finish is None:
                    if text:
                        yield self._shown(text)
                else:
                    self.version = piece.version
                    yield self._end(text, piece.finish)

    def message(self) -> Message:
        """The answer exactly as the model wrote it."""
        return Message("assistant", self._whole, tool_calls=self.calls, sampled=True)

    # -------------------------------------------------------------------------------------------- reading

    def _mark(self) -> bytes:
        """Another for another answer or to another prompt; and for another choice."""
        return np.asarray([self.index, *self.saying.prompt, *self.ids], dtype=np.int64).tobytes()

    def _read(self, tokens: Sequence[int]) -> str:
        said = [token for token in tokens if token not in self.source.renderer.stop]
        return self._passed(self._stop.add(self._words.add(said))) if said else ""

    def _passed(self, text: str) -> str:
        self._whole += text
        return "" if self._silent else self._call.add(text)

    def _shown(self, text: str, calls: tuple[ToolCall, ...] = (), finish: str | None = None) -> Delta:
        self.text += text
        told, self._untold = tuple(self._untold), []
        return Delta(text, told, calls, finish)

    def _end(self, text: str, finish: FinishReason) -> Delta:
        """What was held is text after all, or calls."""
        if finish is FinishReason.ABORT:
            raise Unavailable("the answer took longer than a request may", status=504, code="timeout")
        text += self._passed(self._stop.add(self._words.rest()))
        if self._stop.found is None:
            text += self._passed(self._stop.let_go())
        held = self._whole if self._silent else self._call.let_go()
        calls = () if self.manner.parser is None else read_calls(self.manner.parser, self._whole, self._mark())
        self.calls = calls[:1] if self.manner.one_call else calls
        self.finish = "tool_calls" if self.calls else "length" if finish is FinishReason.LENGTH else "stop"
        return self._shown(text if self.calls else text + held, self.calls, self.finish)


def read_calls(parser: Parser, text: str, mark: bytes) -> tuple[ToolCall, ...]:
    """The calls in a text, with ids of their own: nine letters and digits, which every template takes. Where one of
    them cannot be read the text stays text.

    The ids follow from `mark`: a template may show them to the model, and what it is shown is no matter of chance.
    """
    calls = parser.parse(text)
    if any(call.error is not None for call in calls):
        return ()
    return tuple(replace(call, id=call_id(mark, number)) for number, call in enumerate(calls))


def call_id(mark: bytes, number: int) -> str:
    value = int.from_bytes(hashlib.blake2b(mark + number.to_bytes(4, "big"), digest_size=16).digest(), "big")
    return "".join(LETTERS[value // len(LETTERS) ** place % len(LETTERS)] for place in range(9))


def forced(renderer: Renderer, tools: Sequence[ToolSpec]) -> str:
    """How an answer begins that calls one of these tools, whichever and however: the tokens that all such calls begin
    with. Cut anywhere else, the model would have to go on from half a token of what it is used to write.

    Example:
        forced(renderer, [add])          # '<tool_call>{"name": "add", "arguments":'
        forced(renderer, [add, now])     # '<tool_call>{"name": "'
    """
    arguments: tuple[dict[str, Any], ...] = ({}, {"a": 1}, {"b": "c"})
    try:
        texts = [renderer.parser.format(ToolCall("call_0", tool.name, given)) for tool in tools for given in arguments]
    except ValueError as error:
        raise Refused(f"the model's format of calls has no form for this one: {error}", "tool_choice") from error
    calls = [renderer.encode(renderer.said(text)) for text in texts]
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*calls, strict=False))
    return renderer.decode([column[0] for column in alike])


def logprob_of(source: Source, heard: Heard) -> Iterator[tuple[str, float]]:
    """The token's text and log-probability, then those of the likeliest ones."""
    yield source.renderer.decode([heard.id]), heard.logprob
    for token, logprob in heard.top:
        yield source.renderer.decode([token]), logprob
