"""`/v1/chat/completions` and `/v1/completions`, over any `Source`."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from arborl.serve.choices import Choice, Delta, Heard, logprob_of
from arborl.serve.parsing import RequestWorkers, bounded_route
from arborl.serve.problems import as_problem
from arborl.serve.reading import (
    attended,
    check_model,
    manner_of,
    merged,
    messages_of,
    sampling_of,
    session_of,
    several,
    tokens_of,
    tools_of,
)
from arborl.serve.schemas import ChatRequest, CompletionRequest, Sampled
from arborl.serve.source import Asked, Refused, Source, Unavailable
from arborl.types import ToolCall

Object = dict[str, Any]
SourceOf = Callable[[Request], Source]
"""Who answers a request: the one model, or whoever its path names."""
NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def chat_routes(
    source_of: SourceOf, seconds: float | None = None, prefix: str = "/v1", workers: RequestWorkers | None = None
) -> APIRouter:
    """The routes that sample.

    Args:
        source_of: who answers a request.
        seconds: longest time for one answer.
        prefix: of their paths.
        workers: read requests outside the event loop; an application has one for all its routes.
    """
    workers = workers or RequestWorkers()
    router = APIRouter(prefix=prefix, route_class=bounded_route(workers))

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """An answer to a conversation."""
        source = source_of(request)
        check_model(body.model, source)
        choices = await workers.run(lambda: chat_choices(body, source, seconds), request.state.body_size)
        return await answered(ChatAnswer(body, source, choices), request, body.stream)

    @router.post("/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """What follows a text or token ids."""
        source = source_of(request)
        check_model(body.model, source)
        choices = await workers.run(lambda: text_choices(body, source, seconds), request.state.body_size)
        return await answered(TextAnswer(body, source, choices), request, body.stream)

    return router


def chat_choices(body: ChatRequest, source: Source, seconds: float | None) -> list[Choice]:
    """The choices of an answer to a conversation, not begun yet."""
    tools = tools_of(body.tools, body.tool_choice, source)
    most = body.max_completion_tokens or body.max_tokens
    sampling = sampling_of(body, source, most, seconds)
    asked = Asked(sampling, body.top_logprobs or 0, tools.begins, session_of(body))
    messages, manner = source.memory.recalled(messages_of(body.messages)), manner_of(body, tools, source)
    sayings = source.chat(messages, tools.specs, several(asked, body.n))
    return [Choice(i, saying, source, manner) for i, saying in enumerate(sayings)]


def text_choices(body: CompletionRequest, source: Source, seconds: float | None) -> list[Choice]:
    """The choices of what follows each of the prompts, not begun yet."""
    prompts = [tokens_of(given, source) for given in body.prompts]
    asked = Asked(
        sampling_of(body, source, body.max_tokens, seconds), body.logprobs or 0, session=session_of(body)
    )  # fmt: skip
    manner = manner_of(body, tools_of(None, None, source), source)
    sayings = [source.complete(prompt, one) for prompt in prompts for one in several(asked, body.n)]
    return [Choice(i, saying, source, manner) for i, saying in enumerate(sayings)]


class Answer(ABC):
    """What clients are told of some choices; a kind of answer is its words for them."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, body: Sampled, source: Source, choices: Sequence[Choice]):
        self.body, self.source, self.choices = body, source, choices
        self.about: Object = {
            "id": f"{self.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": source.name,
        }

    @abstractmethod
    def whole(self, choice: Choice, tokens: Sequence[Heard]) -> Object:
        """A choice that is there."""

    @abstractmethod
    def part(self, choice: Choice, delta: Delta) -> Object:
        """What is new of one."""

    def usage(self) -> Object:
        given = sum(len(choice.saying.prompt) for choice in self.choices[:: self.body.n])
        sampled = sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}

    def ids(self, choice: Choice) -> Object:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(choice.saying.prompt), "token_ids": list(choice.ids)}

    async def all(self) -> Object:
        """The answer in one."""
        heard: dict[int, list[Heard]] = {choice.index: [] for choice in self.choices}
        async with aclosing(merged(self.choices)) as parts:  # type: ignore[type-var]
            async for choice, delta in parts:
                heard[choice.index] += delta.tokens
        told = [self.whole(choice, heard[choice.index]) for choice in self.choices]
        mark = f"step-{max(choice.version for choice in self.choices)}"
        return {**self.about, "object": self.kind, "choices": told, "usage": self.usage(), "system_fingerprint": mark}

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        options, about = self.body.stream_options, {**self.about, "object": self.chunk_kind}
        usage = options is not None and options.include_usage
        async with aclosing(merged(self.choices)) as parts:  # type: ignore[type-var]
            async for choice, delta in parts:
                mark = {"system_fingerprint": f"step-{choice.version}"}
                told = self.part(choice, delta)
                yield event({**about, **mark, "choices": [told], **({"usage": None} if usage else {})})
        if usage:
            yield event({**about, "choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"


class ChatAnswer(Answer):
    """As chat completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, body: ChatRequest, source: Source, choices: Sequence[Choice]):
        super().__init__(body, source, choices)
        self.logprobs, self.memory = body.logprobs, source.memory
        self._begun: set[int] = set()

    def whole(self, choice: Choice, tokens: Sequence[Heard]) -> Object:
        self.memory.keep(choice.message())
        message: Object = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text.rstrip() or None, "tool_calls": [call_of(one) for one in choice.calls]}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._likely(tokens),
            "finish_reason": choice.finish,
            **self.ids(choice),
        }

    def part(self, choice: Choice, delta: Delta) -> Object:
        told: Object = {}
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            told = {"role": "assistant", "content": ""}
        if delta.text:
            told["content"] = delta.text
        if delta.calls:
            told["tool_calls"] = [{"index": i, **call_of(one)} for i, one in enumerate(delta.calls)]
        if delta.finish:
            self.memory.keep(choice.message())
        return {
            "index": choice.index,
            "delta": told,
            "logprobs": self._likely(delta.tokens) if delta.tokens else None,
            "finish_reason": delta.finish,
            **(self.ids(choice) if delta.finish else {}),
        }

    def _likely(self, tokens: Sequence[Heard]) -> Object | None:
        if not self.logprobs:
            return None
        rows = []
        for heard in tokens:
            own, *others = ({"token": text, "logprob": value, "bytes": bytes_of(text)} for text, value in
                            logprob_of(self.source, heard))  # fmt: skip
            rows.append({**own, "top_logprobs": others})
        return {"content": rows, "refusal": None}


class TextAnswer(Answer):
    """As completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    body: CompletionRequest

    def __init__(self, body: CompletionRequest, source: Source, choices: Sequence[Choice]):
        super().__init__(body, source, choices)
        self._begun: set[int] = set()
        self._shown: dict[int, int] = {}

    def whole(self, choice: Choice, tokens: Sequence[Heard]) -> Object:
        return self._told(choice, self._echo(choice) + choice.text, tokens, choice.finish) | self.ids(choice)

    def part(self, choice: Choice, delta: Delta) -> Object:
        text = delta.text
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            text = self._echo(choice) + text
        told = self._told(choice, text, delta.tokens, delta.finish)
        return told | (self.ids(choice) if delta.finish else {})

    def _told(self, choice: Choice, text: str, tokens: Sequence[Heard], finish: str | None) -> Object:
        likely = self._likely(choice, tokens)
        return {"index": choice.index, "text": text, "logprobs": likely, "finish_reason": finish}

    def _echo(self, choice: Choice) -> str:
        return self.source.renderer.decode(choice.saying.prompt) if self.body.echo else ""

    def _likely(self, choice: Choice, tokens: Sequence[Heard]) -> Object | None:
        if self.body.logprobs is None:
            return None
        rows = [list(logprob_of(self.source, heard)) for heard in tokens]
        at, places = self._shown.get(choice.index, 0), []
        for row in rows:
            places.append(at)
            at += len(row[0][0])
        self._shown[choice.index] = at
        return {
            "tokens": [row[0][0] for row in rows],
            "token_logprobs": [row[0][1] for row in rows],
            "top_logprobs": [dict(row[1:]) for row in rows] if self.body.logprobs else None,
            "text_offset": places,
        }


async def answered(answer: Any, request: Request, stream: bool) -> Response:
    """The response; of a stream, once it has begun: what is refused is refused with a status."""
    if not stream:
        whole = await attended(request, answer.all())
        request.state.usage = whole["usage"]
        return JSONResponse(whole)
    events = answer.stream()
    first = await attended(request, anext(events))
    told = followed(first, events, request, answer)
    return StreamingResponse(told, media_type="text/event-stream", headers=NO_BUFFER)


async def followed(first: bytes, events: AsyncIterator[bytes], request: Request, answer: Any) -> AsyncIterator[bytes]:
    """The first event and the others. What goes wrong on the way is an event too: the status has been said."""
    yield first
    try:
        async for one in events:
            yield one
    except (Refused, Unavailable) as error:
        yield event(as_problem(error)[1])
    finally:
        request.state.usage = answer.usage()
        await events.aclose()  # type: ignore[attr-defined]


def event(told: Object) -> bytes:
    return b"data: " + json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


def call_of(call: ToolCall) -> Object:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def bytes_of(text: str) -> list[int] | None:
    """The token's bytes, where it is text by itself."""
    return None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
