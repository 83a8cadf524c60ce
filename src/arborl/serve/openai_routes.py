"""OpenAI's routes `/v1/chat/completions`, `/v1/completions` and `/v1/responses` over any `ModelBackend`."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from arborl.serve import parsing
from arborl.serve.choices import ChoiceDelta, ChoiceStream, SampledToken, merge_deltas, token_logprobs
from arborl.serve.middleware import error_of
from arborl.serve.model_backend import ModelBackend, RequestError, ServiceUnavailable
from arborl.serve.schemas import ChatRequest, CompletionOptions, CompletionRequest, ResponseRequest, ToolChoice
from arborl.types import ToolCall

T = TypeVar("T")
Object = dict[str, Any]
BackendOf = Callable[[Request], ModelBackend]
"""Selects the backend of a request: the served model, or the episode in the path."""
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DISCONNECT_CHECK_SECONDS = 1.0


def openai_routes(
    backend_of: BackendOf,
    seconds: float | None = None,
    prefix: str = "/v1",
    workers: parsing.RequestWorkers | None = None,
) -> APIRouter:
    """Routes that sample."""
    workers = workers or parsing.RequestWorkers()
    router = APIRouter(prefix=prefix, route_class=parsing.bounded_route(workers))

    async def answer(body: Any, request: Request, choices_of: Any, writer: Any) -> Response:
        backend = backend_of(request)
        parsing.check_model_name(body.model, backend)
        has_schema = bool(parsing.schema_of(body))  # a schema is compiled, which may take long
        choices = await workers.run(lambda: choices_of(body, backend, seconds), request.state.body_size, has_schema)
        return await send(writer(body, backend, choices), request, body.stream)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Complete a conversation."""
        return await answer(body, request, chat_choices, ChatCompletionWriter)

    @router.post("/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete texts or token ids."""
        return await answer(body, request, text_choices, TextCompletionWriter)

    @router.post("/responses", response_model=None)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answer a text, or the items of a conversation."""
        return await answer(body, request, response_choice, ResponseWriter)

    return router


def chat_choices(body: ChatRequest, backend: ModelBackend, seconds: float | None) -> list[ChoiceStream]:
    tools = parsing.select_tools(body.tools, body.tool_choice, backend)
    max_tokens = body.max_completion_tokens or body.max_tokens
    request = parsing.generation_request(body, backend, max_tokens, seconds, body.top_logprobs or 0, tools.prefix)
    messages, options = (
        backend.reply_cache.restore(parsing.parse_messages(body.messages)),
        parsing.choice_options(body, tools, backend),
    )
    streams = backend.chat(messages, tools.specs, parsing.repeat_with_seeds(request, body.n))
    return [ChoiceStream(i, stream, backend, options) for i, stream in enumerate(streams)]


def text_choices(body: CompletionRequest, backend: ModelBackend, seconds: float | None) -> list[ChoiceStream]:
    prompts = [parsing.encode_prompt(prompt, backend) for prompt in body.prompts]
    request = parsing.generation_request(body, backend, body.max_tokens, seconds, body.logprobs or 0)
    options = parsing.choice_options(body, parsing.ToolSelection(), backend)
    requests = parsing.repeat_with_seeds(request, body.n)
    streams = [backend.complete(prompt, one) for prompt in prompts for one in requests]
    return [ChoiceStream(i, stream, backend, options) for i, stream in enumerate(streams)]


def response_choice(body: ResponseRequest, backend: ModelBackend, seconds: float | None) -> ChoiceStream:
    tools = parsing.select_tools(body.tools, body.tool_choice, backend)
    request = parsing.generation_request(body, backend, body.max_output_tokens, seconds, prefix=tools.prefix)
    messages = backend.reply_cache.restore(parsing.parse_messages(input_messages(body)))
    (stream,) = backend.chat(messages, tools.specs, [request])
    return ChoiceStream(0, stream, backend, parsing.choice_options(body, tools, backend))


class CompletionWriter(ABC):
    """Writes choices as a JSON object or as server-sent events. Subclasses define the format of a choice."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, body: CompletionOptions, backend: ModelBackend, choices: Sequence[ChoiceStream]):
        self.body, self.backend, self.choices = body, backend, choices
        self.header = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": backend.name}
        self._started: set[int] = set()

    @abstractmethod
    def choice_object(self, choice: ChoiceStream, tokens: Sequence[SampledToken]) -> Object:
        """A finished choice."""

    @abstractmethod
    def chunk_object(self, choice: ChoiceStream, delta: ChoiceDelta, is_first: bool) -> Object:
        """A part of a choice."""

    def usage(self) -> Object:
        num_prompt = sum(len(choice.stream.prompt) for choice in self.choices[:: self.body.n])
        return usage_object(num_prompt, sum(len(choice.ids) for choice in self.choices))

    def token_ids(self, choice: ChoiceStream) -> Object:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(choice.stream.prompt), "token_ids": list(choice.ids)}

    async def json_object(self) -> Object:
        tokens: dict[int, list[SampledToken]] = {choice.index: [] for choice in self.choices}
        async with aclosing(merge_deltas(self.choices)) as deltas:  # type: ignore[type-var]
            async for choice, delta in deltas:
                tokens[choice.index] += delta.tokens
        choices = [self.choice_object(choice, tokens[choice.index]) for choice in self.choices]
        version = max(choice.version for choice in self.choices)
        return {**self.header, "object": self.kind, "choices": choices, "usage": self.usage(),
                "system_fingerprint": f"step-{version}"}  # fmt: skip

    async def events(self) -> AsyncIterator[bytes]:
        options, header = self.body.stream_options, {**self.header, "object": self.chunk_kind}
        include_usage = options is not None and options.include_usage
        async with aclosing(merge_deltas(self.choices)) as deltas:  # type: ignore[type-var]
            async for choice, delta in deltas:
                chunk = self.chunk_object(choice, delta, choice.index not in self._started)
                self._started.add(choice.index)
                fingerprint = {"system_fingerprint": f"step-{choice.version}"}
                usage = {"usage": None} if include_usage else {}
                yield event_bytes({**header, **fingerprint, "choices": [chunk], **usage})
        if include_usage:
            yield event_bytes({**header, "choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"


class ChatCompletionWriter(CompletionWriter):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    body: ChatRequest

    def choice_object(self, choice: ChoiceStream, tokens: Sequence[SampledToken]) -> Object:
        self.backend.reply_cache.add(choice.message())
        message: Object = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            message["content"] = choice.text.rstrip() or None
            message["tool_calls"] = [tool_call_object(call) for call in choice.tool_calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": choice.finish_reason,
            **self.token_ids(choice),
        }

    def chunk_object(self, choice: ChoiceStream, delta: ChoiceDelta, is_first: bool) -> Object:
        message: Object = {"role": "assistant", "content": ""} if is_first else {}
        if delta.text:
            message["content"] = delta.text
        if delta.tool_calls:
            message["tool_calls"] = [{"index": i, **tool_call_object(call)} for i, call in enumerate(delta.tool_calls)]
        if delta.finish_reason:
            self.backend.reply_cache.add(choice.message())
        return {
            "index": choice.index,
            "delta": message,
            "logprobs": self._logprobs(delta.tokens) if delta.tokens else None,
            "finish_reason": delta.finish_reason,
            **(self.token_ids(choice) if delta.finish_reason else {}),
        }

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Object | None:
        if not self.body.logprobs:
            return None
        rows = []
        for token in tokens:
            sampled, *top = (
                {"token": text, "logprob": logprob, "bytes": token_bytes(text)}
                for text, logprob in token_logprobs(self.backend, token)
            )
            rows.append({**sampled, "top_logprobs": top})
        return {"content": rows, "refusal": None}


class TextCompletionWriter(CompletionWriter):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    body: CompletionRequest

    def __init__(self, body: CompletionRequest, backend: ModelBackend, choices: Sequence[ChoiceStream]):
        super().__init__(body, backend, choices)
        self._offsets: dict[int, int] = {}  # characters of each choice whose log-probabilities were written

    def choice_object(self, choice: ChoiceStream, tokens: Sequence[SampledToken]) -> Object:
        return self._object(choice, self._echo(choice) + choice.text, tokens, choice.finish_reason)

    def chunk_object(self, choice: ChoiceStream, delta: ChoiceDelta, is_first: bool) -> Object:
        text = self._echo(choice) + delta.text if is_first else delta.text
        return self._object(choice, text, delta.tokens, delta.finish_reason)

    def _object(
        self, choice: ChoiceStream, text: str, tokens: Sequence[SampledToken], finish_reason: str | None
    ) -> Object:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, tokens),
            "finish_reason": finish_reason,
            **(self.token_ids(choice) if finish_reason else {}),
        }

    def _echo(self, choice: ChoiceStream) -> str:
        return self.backend.renderer.decode(choice.stream.prompt) if self.body.echo else ""

    def _logprobs(self, choice: ChoiceStream, tokens: Sequence[SampledToken]) -> Object | None:
        if self.body.logprobs is None:
            return None
        rows = [list(token_logprobs(self.backend, token)) for token in tokens]
        offset, offsets = self._offsets.get(choice.index, 0), []
        for row in rows:
            offsets.append(offset)
            offset += len(row[0][0])
        self._offsets[choice.index] = offset
        return {
            "tokens": [row[0][0] for row in rows],
            "token_logprobs": [row[0][1] for row in rows],
            "top_logprobs": [dict(row[1:]) for row in rows] if self.body.logprobs else None,
            "text_offset": offsets,
        }


def input_messages(body: ResponseRequest) -> list[Object]:
    """The input items as messages. Consecutive function calls become one assistant message."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages: list[Object] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text_parts(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        elif kind == "function_call_output":
            content, call_id = _text_parts(item.get("output")), item.get("call_id")
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        else:
            raise RequestError(f"input[{number}].type: {kind!r} is not supported", "input")
    if not messages:
        raise RequestError("input: empty", "input")
    return messages


def _text_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part.get("text")} if isinstance(part, Mapping) else part for part in content]


class ResponseWriter:
    """Writes one choice in the format of `/v1/responses`."""

    def __init__(self, body: ResponseRequest, backend: ModelBackend, choice: ChoiceStream):
        self.body, self.backend, self.choice = body, backend, choice
        self.id, self.created_at = f"resp_{uuid.uuid4().hex}", time.time()
        self.message_id = f"msg_{uuid.uuid4().hex}"
        self._sequence_number = 0

    def usage(self) -> Object:
        num_prompt, num_sampled = len(self.choice.stream.prompt), len(self.choice.ids)
        return {
            "input_tokens": num_prompt, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": num_prompt + num_sampled,
        }  # fmt: skip

    async def json_object(self) -> Object:
        async for _ in self.choice.deltas():
            pass
        return self._response(self._outputs())

    async def events(self) -> AsyncIterator[bytes]:
        """Events of the text while it is sampled, then events of each function call."""
        in_progress = self._response(None)
        yield self._event("response.created", response=in_progress)
        yield self._event("response.in_progress", response=in_progress)
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        is_open = False
        async with aclosing(self.choice.deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.text and not is_open:
                    is_open = True
                    for event in self._open_message(place):
                        yield event
                if delta.text:
                    yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
        outputs = self._outputs()
        for number, item in enumerate(outputs):
            if item["type"] == "message":
                for event in () if is_open else self._open_message(place):
                    yield event
                yield self._event("response.output_text.done", **place, text=self.choice.text, logprobs=[])
                yield self._event("response.content_part.done", **place, part=item["content"][0])
            else:
                where, arguments = {"item_id": item["id"], "output_index": number}, item["arguments"]
                yield self._event("response.output_item.added", output_index=number, item={**item, "arguments": ""})
                yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
                done = {"name": item["name"], "arguments": arguments}
                yield self._event("response.function_call_arguments.done", **where, **done)
            yield self._event("response.output_item.done", output_index=number, item=item)
        response = self._response(outputs)
        yield self._event(f"response.{response['status']}", response=response)

    def _open_message(self, place: Object) -> list[bytes]:
        item = {**self._message("in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=output_text("")),
        ]

    def _message(self, status: str) -> Object:
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": status}

    def _outputs(self) -> list[Object]:
        self.backend.reply_cache.add(self.choice.message())
        text, calls = self.choice.text, [function_call_object(call) for call in self.choice.tool_calls]
        message = {**self._message("completed"), "content": [output_text(text)]}
        return [*([message] if text or not calls else []), *calls]

    def _response(self, outputs: list[Object] | None) -> Object:
        body, choice = self.body, self.body.tool_choice
        is_cut = self.choice.finish_reason == "length"
        return {
            "id": self.id, "object": "response", "created_at": self.created_at, "error": None,
            "status": "in_progress" if outputs is None else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "model": self.backend.name, "output": outputs or [], "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None, "store": False, "temperature": body.temperature,
            "text": {"format": body.text_format()},
            "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, ToolChoice) else choice or "auto",
            "tools": body.tools or [], "top_p": body.top_p, "truncation": "disabled",
            "usage": None if outputs is None else self.usage(), "metadata": body.metadata or {},
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._sequence_number, **fields}, ensure_ascii=False)
        self._sequence_number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode("utf-8", "replace")


async def send(writer: CompletionWriter | ResponseWriter, request: Request, stream: bool) -> Response:
    if not stream:
        body = await until_disconnected(request, writer.json_object())
        request.state.usage = body["usage"]
        return JSONResponse(body)
    return await stream_events(request, writer.events(), writer.usage)


async def stream_events(request: Request, events: AsyncIterator[bytes], usage: Callable[[], Object]) -> Response:
    """A response of server-sent events. It starts with the first, so that errors before it have their HTTP status;
    later ones are sent as events."""
    first = await until_disconnected(request, anext(events))

    async def body() -> AsyncIterator[bytes]:
        yield first
        try:
            async for event in events:
                yield event
        except (RequestError, ServiceUnavailable) as error:
            yield event_bytes(error_of(error)[1])
        finally:
            request.state.usage = usage()
            await events.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(body(), media_type="text/event-stream", headers=SSE_HEADERS)


async def until_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=DISCONNECT_CHECK_SECONDS))[0]:
            if await request.is_disconnected():
                raise ServiceUnavailable("the client disconnected", status=499)
        return task.result()
    finally:
        task.cancel()


def event_bytes(data: Object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


def usage_object(num_prompt: int, num_sampled: int) -> Object:
    total = num_prompt + num_sampled
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": total}


def tool_call_object(call: ToolCall) -> Object:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def function_call_object(call: ToolCall) -> Object:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": arguments}  # fmt: skip


def output_text(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def token_bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None if the token is only a part of a character."""
    return None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
