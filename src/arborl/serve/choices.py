"""One choice of a completion as a stream of text, with stop texts removed and tool calls parsed at the end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from arborl.chat.formats import ToolCallParser
from arborl.chat.renderer import Renderer
from arborl.serve.model_backend import ModelBackend, RequestError, ServiceUnavailable, TokenStream, TopLogprobs
from arborl.types import FinishReason, Message, ToolCall, ToolSpec

REPLACEMENT_CHARACTER = "\ufffd"  # decoders write it for bytes that are not a complete character
ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class Detokenizer:
    """Decodes a stream of tokens into text, complete characters only. The text of a token may depend on the token
    before it. So each new text is the difference of two decodings that start at the last complete character. The texts
    joined equal the decoding of all tokens."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._ids: list[int] = []
        self._start, self._num_returned = 0, 0
        """First token of the window that is decoded; number of tokens whose text has been returned."""

    def add(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self.renderer.decode(self._ids[self._start :])
        return "" if text.endswith(REPLACEMENT_CHARACTER) else self._new(text)

    def flush(self) -> str:
        return self._new(self.renderer.decode(self._ids[self._start :]))

    def _new(self, text: str) -> str:
        returned = self.renderer.decode(self._ids[self._start : self._num_returned])
        self._start, self._num_returned = self._num_returned, len(self._ids)
        return text[len(returned) :]


class StopMatcher:
    """Passes text until one of the stop texts; holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.held = ""  # text that is held back; after a match, the stop text and everything behind it
        self.found: str | None = None

    def add(self, text: str) -> str:
        self.held += text
        if self.found is not None:
            return ""
        if not self.stops:
            return self.release()
        matches = [(start, -len(stop), stop) for stop in self.stops if (start := self.held.find(stop)) >= 0]
        if matches:
            end, _, self.found = min(matches)
        else:
            end = len(self.held) - self._partial_match()
        passed, self.held = self.held[:end], self.held[end:]
        return passed

    def release(self) -> str:
        held, self.held = self.held, ""
        return held

    def _partial_match(self) -> int:
        longest = max(map(len, self.stops)) - 1
        sizes = range(min(longest, len(self.held)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(self.held[-size:]) for stop in self.stops)), 0)


@dataclass(frozen=True, slots=True)
class SampledToken:
    id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New part of a choice."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    """Tokens since the last delta, those of held-back text included. Each token is in exactly one delta."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """How a completion is turned into text and tool calls."""

    stops: tuple[str, ...] = ()  # texts that end the completion and are not part of it
    parser: ToolCallParser | None = None  # parser of tool calls; None without tools
    prefix: str = ""  # first text of the answer, which was part of the prompt
    single_call: bool = False


class ChoiceStream:
    """Reads one completion while it is sampled."""

    def __init__(self, index: int, stream: TokenStream, backend: ModelBackend, options: ChoiceOptions):
        self.index, self.stream, self.backend, self.options = index, stream, backend, options
        self.ids: list[int] = []
        self.text = ""
        self.tool_calls: tuple[ToolCall, ...] = ()
        self.finish_reason = ""
        self.version = backend.version
        self._detokenizer, self._stop = Detokenizer(backend.renderer), StopMatcher(options.stops)
        opens = () if options.parser is None else getattr(options.parser, "opens", None)
        self._call_start, self._hold_all = StopMatcher(opens or ()), opens is None
        """Text from the start of a tool call on is held back; all text if the format has no start marker."""
        self._full_text = options.prefix
        self._new_tokens: list[SampledToken] = []

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        prefix = "" if self._hold_all else self._call_start.add(self.options.prefix)
        async with aclosing(aiter(self.stream)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                self.ids += chunk.tokens
                tops = chunk.top or ((),) * len(chunk.tokens)
                for token, logprob, top in zip(chunk.tokens, chunk.logprobs, tops, strict=True):
                    if self._stop.found is None and token not in self.backend.renderer.stop:
                        self._new_tokens.append(SampledToken(token, logprob, top))
                text, prefix = prefix + self._decode(chunk.tokens), ""
                if chunk.finish is not None:
                    self.version = chunk.version
                    yield self._finish(text, chunk.finish)
                elif text:
                    yield self._delta(text)

    def message(self) -> Message:
        return Message("assistant", self._full_text, tool_calls=self.tool_calls, sampled=True)

    def _decode(self, tokens: Sequence[int]) -> str:
        ids = [token for token in tokens if token not in self.backend.renderer.stop]
        return self._pass(self._stop.add(self._detokenizer.add(ids))) if ids else ""

    def _pass(self, text: str) -> str:
        self._full_text += text
        return "" if self._hold_all else self._call_start.add(text)

    def _delta(self, text: str, calls: tuple[ToolCall, ...] = (), finish_reason: str | None = None) -> ChoiceDelta:
        self.text += text
        tokens, self._new_tokens = tuple(self._new_tokens), []
        return ChoiceDelta(text, tokens, calls, finish_reason)

    def _finish(self, text: str, finish: FinishReason) -> ChoiceDelta:
        """The last delta. Held-back text becomes tool calls, or text if it contains none."""
        if finish is FinishReason.ABORT:
            raise ServiceUnavailable("the answer exceeded the time limit of a request", status=504, code="timeout")
        text += self._pass(self._stop.add(self._detokenizer.flush()))
        if self._stop.found is None:
            text += self._pass(self._stop.release())
        held = self._full_text if self._hold_all else self._call_start.release()
        seed = np.asarray([self.index, *self.stream.prompt, *self.ids], dtype=np.int64).tobytes()
        parser = self.options.parser
        calls = () if parser is None else parse_tool_calls(parser, self._full_text, seed)
        self.tool_calls = calls[:1] if self.options.single_call else calls
        self.finish_reason = "tool_calls" if self.tool_calls else "length" if finish is FinishReason.LENGTH else "stop"
        return self._delta(text if self.tool_calls else text + held, self.tool_calls, self.finish_reason)


def parse_tool_calls(parser: ToolCallParser, text: str, seed: bytes) -> tuple[ToolCall, ...]:
    """The tool calls of a text; none if one of them is malformed. Ids are nine letters and digits, which every template
    accepts. They are a hash of `seed`: a template may show them to the model, so equal inputs must give equal ids."""
    calls = parser.parse(text)
    if any(call.error is not None for call in calls):
        return ()
    return tuple(replace(call, id=tool_call_id(seed, number)) for number, call in enumerate(calls))


def tool_call_id(seed: bytes, number: int) -> str:
    value = int.from_bytes(hashlib.blake2b(seed + number.to_bytes(4, "big"), digest_size=16).digest(), "big")
    return "".join(ID_LETTERS[value // len(ID_LETTERS) ** place % len(ID_LETTERS)] for place in range(9))


def forced_call_prefix(renderer: Renderer, tools: Sequence[ToolSpec]) -> str:
    """The common first tokens of all calls of these tools, for `tool_choice`. The cut is between two tokens, because
    the model does not continue half a token well."""
    examples: tuple[dict[str, Any], ...] = ({}, {"a": 1}, {"b": "c"})
    try:
        texts = [renderer.parser.format(ToolCall("call_0", tool.name, args)) for tool in tools for args in examples]
    except ValueError as error:
        raise RequestError(f"the model's tool-call format cannot express this call: {error}", "tool_choice") from error
    encoded = [renderer.encode(renderer.escape_reply(text)) for text in texts]
    common = takewhile(lambda column: len(set(column)) == 1, zip(*encoded, strict=False))
    return renderer.decode([column[0] for column in common])


def token_logprobs(backend: ModelBackend, token: SampledToken) -> Iterator[tuple[str, float]]:
    yield backend.renderer.decode([token.id]), token.logprob
    for id, logprob in token.top:
        yield backend.renderer.decode([id]), logprob


async def merge_deltas(choices: Sequence[ChoiceStream]) -> AsyncIterator[tuple[ChoiceStream, ChoiceDelta]]:
    if len(choices) == 1:
        async with aclosing(choices[0].deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield choices[0], delta
        return
    queue: asyncio.Queue[tuple[ChoiceStream, ChoiceDelta] | Exception | None] = asyncio.Queue()

    async def forward(choice: ChoiceStream) -> None:
        try:
            async for delta in choice.deltas():
                queue.put_nowait((choice, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(choice)) for choice in choices]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
