"""`/v1/responses` in its plain form: text and tool calls, whole or as events; nothing is kept between requests."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from arborl.serve.chat import SourceOf, answered
from arborl.serve.choices import Choice
from arborl.serve.parsing import RequestWorkers, bounded_route
from arborl.serve.reading import check_model, manner_of, messages_of, sampling_of, session_of, tools_of
from arborl.serve.schemas import ResponseRequest, ToolChoice
from arborl.serve.source import Asked, Refused, Source
from arborl.types import ToolCall

Object = dict[str, Any]


def response_routes(
    source_of: SourceOf, seconds: float | None = None, prefix: str = "/v1", workers: RequestWorkers | None = None
) -> APIRouter:
    """The route; see `chat_routes`."""
    workers = workers or RequestWorkers()
    router = APIRouter(prefix=prefix, route_class=bounded_route(workers))

    @router.post("/responses", response_model=None)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """An answer to a text, or to items of a conversation."""
        source = source_of(request)
        check_model(body.model, source)
        choice = await workers.run(lambda: response_choice(body, source, seconds), request.state.body_size)
        return await answered(ResponseAnswer(body, source, choice), request, body.stream)

    return router


def response_choice(body: ResponseRequest, source: Source, seconds: float | None) -> Choice:
    """The answer, not begun yet."""
    tools = tools_of(body.tools, body.tool_choice, source)
    asked = Asked(sampling_of(body, source, body.max_output_tokens, seconds), 0, tools.begins, session_of(body))
    messages = source.memory.recalled(messages_of(items(body)))
    (saying,) = source.chat(messages, tools.specs, [asked])
    return Choice(0, saying, source, manner_of(body, tools, source))


def items(body: ResponseRequest) -> list[Object]:
    """The input as messages: calls of one turn belong to one message."""
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    told: list[Object] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for number, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            told.append({"role": item.get("role"), "content": parts(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "function": function}
            if not (told and told[-1]["role"] == "assistant"):
                told.append({"role": "assistant", "content": ""})
            told[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            told.append({"role": "tool", "content": parts(item.get("output")), "tool_call_id": item.get("call_id")})
        else:
            raise Refused(f"input[{number}].type: {kind!r} is not understood here", "input")
    if not told:
        raise Refused("input: empty", "input")
    return told


def parts(content: Any) -> Any:
    """`input_text` and `output_text` are text."""
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": one.get("text")} if isinstance(one, Mapping) else one for one in content]


class ResponseAnswer:
    """What clients are told of one choice."""

    def __init__(self, body: ResponseRequest, source: Source, choice: Choice):
        self.body, self.source, self.choice, self.memory = body, source, choice, source.memory
        self.id, self.created = f"resp_{uuid.uuid4().hex}", time.time()
        self.message = f"msg_{uuid.uuid4().hex}"
        self._number = 0

    def usage(self) -> Object:
        given, sampled = len(self.choice.saying.prompt), len(self.choice.ids)
        return {
            "input_tokens": given, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": given + sampled,
        }  # fmt: skip

    async def all(self) -> Object:
        async for _ in self.choice.deltas():
            pass
        return self._told(self._outputs())

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of a text, then those of each call."""
        begun = self._told(None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        place = {"item_id": self.message, "output_index": 0, "content_index": 0}
        opened = False
        async with aclosing(self.choice.deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.text and not opened:
                    opened = True
                    item = {"id": self.message, "type": "message", "role": "assistant", "status": "in_progress"}
                    yield self._event("response.output_item.added", output_index=0, item={**item, "content": []})
                    yield self._event("response.content_part.added", **place, part=text_part(""))
                if delta.text:
                    yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
        outputs = self._outputs()
        for number, item in enumerate(outputs):
            if item["type"] == "message":
                if not opened:
                    yield self._event("response.output_item.added", output_index=0, item={**item, "content": []})
                    yield self._event("response.content_part.added", **place, part=text_part(""))
                yield self._event("response.output_text.done", **place, text=self.choice.text, logprobs=[])
                yield self._event("response.content_part.done", **place, part=item["content"][0])
            else:
                where = {"item_id": item["id"], "output_index": number}
                yield self._event("response.output_item.added", output_index=number, item={**item, "arguments": ""})
                yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
                yield self._event(
                    "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
                )
            yield self._event("response.output_item.done", output_index=number, item=item)
        done = self._told(outputs)
        yield self._event(f"response.{done['status']}", response=done)

    def _outputs(self) -> list[Object]:
        self.memory.keep(self.choice.message())
        text = [{"id": self.message, "type": "message", "role": "assistant", "status": "completed",
                 "content": [text_part(self.choice.text)]}]  # fmt: skip
        calls = [_call(one) for one in self.choice.calls]
        return [*(text if self.choice.text or not calls else []), *calls]

    def _told(self, outputs: list[Object] | None) -> Object:
        cut = self.choice.finish == "length"
        status = "in_progress" if outputs is None else "incomplete" if cut else "completed"
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self.body.instructions, "max_output_tokens": self.body.max_output_tokens,
            "model": self.source.name, "output": outputs or [], "parallel_tool_calls": self.body.parallel_tool_calls,
            "previous_response_id": None, "store": False, "temperature": self.body.temperature,
            "text": {"format": {"type": "text"}}, "tool_choice": choice_of(self.body),
            "tools": self.body.tools or [], "top_p": self.body.top_p, "truncation": "disabled",
            "usage": None if outputs is None else self.usage(), "metadata": self.body.metadata or {},
        }  # fmt: skip

    def _event(self, kind: str, **told: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._number, **told}, ensure_ascii=False)
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode("utf-8", "replace")


def choice_of(body: ResponseRequest) -> Any:
    chosen = body.tool_choice
    return chosen.model_dump(exclude_none=True) if isinstance(chosen, ToolChoice) else chosen or "auto"


def text_part(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCall) -> Object:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": arguments}  # fmt: skip
