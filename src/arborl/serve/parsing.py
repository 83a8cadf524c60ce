"""From the bytes of a request to a checked generation request.

Bodies are parsed within bounds. Large ones are parsed, rendered and tokenized in worker threads with a deadline, so
that the event loop keeps answering other requests.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from arborl.chat.conversation import has_more_tokens
from arborl.chat.messages import read_messages, read_tools
from arborl.chat.tokenizer import TextTokenizer
from arborl.serve.choices import ChoiceOptions, forced_call_prefix
from arborl.serve.model_backend import (
    CONTEXT_LENGTH_EXCEEDED,
    GenerationRequest,
    ModelBackend,
    RequestError,
    ServiceUnavailable,
)
from arborl.serve.schemas import MAX_NAME_CHARS, CompletionOptions, SamplingRequest, ToolChoice
from arborl.tools.core.background_threads import TooManyHangingCalls, run_in_thread
from arborl.tools.core.json_bounds import DEFAULT_BOUNDS, JsonBounds, JsonBoundsError, check_json, load_json
from arborl.tools.remote.tool_protocol import replace_surrogates
from arborl.types import Message, Sampling, ToolSpec

T = TypeVar("T")
SMALL_BODY_BYTES = 8192
"""Smaller bodies are parsed in the event loop: that takes milliseconds at most, less than a thread may cost."""
NUM_WORKERS = 4
PARSE_SECONDS = 10.0
LARGE_BODY_BYTES, TRIM_SECONDS = 2**20, 5.0
"""After a body of this size freed memory is returned to the system, this many seconds later."""
TOO_COMPLEX = "body_too_complex"
UNLIMITED_TOKENS = 2**31 - 1


class RequestWorkers:
    """Threads that parse, validate, render and tokenize large requests."""

    def __init__(self, num_workers: int = NUM_WORKERS, seconds: float = PARSE_SECONDS):
        self.seconds = seconds
        self._slots = asyncio.Semaphore(num_workers)
        self._trim_timer: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], T], body_bytes: int, in_thread: bool = False) -> T:
        """The result of `work`, which belongs to a request with a body of this size. It runs `in_thread` in any case
        if small bodies may take long too."""
        if body_bytes <= SMALL_BODY_BYTES and not in_thread:
            return work()
        try:
            async with asyncio.timeout(self.seconds), self._slots:
                result: T = await run_in_thread(work, "reading requests", self.seconds)
                return result
        except (TimeoutError, TooManyHangingCalls) as error:
            message = f"reading the request took longer than {self.seconds:g} s: send less, or retry later"
            raise ServiceUnavailable(message, code="request_timeout") from error
        finally:
            if body_bytes >= LARGE_BODY_BYTES and self._trim_timer is None:
                self._trim_timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trim_timer = None
        threading.Thread(target=trim_memory, name="arborl-trim", daemon=True).start()


def trim_memory() -> None:
    """Return freed memory to the system. glibc otherwise keeps most of what large requests used."""
    with suppress(AttributeError, OSError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


class ParsedRequest(Request):
    """A request whose body is already parsed. FastAPI takes the object unchanged."""

    parsed: BaseModel

    async def body(self) -> bytes:
        return b"parsed"

    async def json(self) -> Any:
        return self.parsed


def bounded_route(workers: RequestWorkers) -> type[APIRoute]:
    """A route class whose bodies are parsed by `workers`, for `APIRouter(route_class=…)`. It sets
    `request.state.body_size` to the size of the body in bytes."""

    class ParsedBodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            model: Any = self.body_field.field_info.annotation

            async def parse_and_handle(request: Request) -> Response:
                parsed = ParsedRequest(request.scope, request.receive)
                _check_content_type(parsed)
                data = await request.body()
                parsed.state.body_size = len(data)
                parsed.parsed = await workers.run(partial(parse_body, data, model), len(data))
                return await handle(parsed)

            return parse_and_handle

    return ParsedBodyRoute


def parse_body(data: bytes, model: type[BaseModel]) -> BaseModel:
    try:
        tree = load_json(data)
    except JsonBoundsError as error:
        raise RequestError(str(error), code=TOO_COMPLEX) from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in errors]) from None


def _check_content_type(request: Request) -> None:
    """A web page can send other content types to any address without a preflight request."""
    kind, _, subtype = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise RequestError("send the body as Content-Type: application/json", code="invalid_content_type")


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """Tools of a request."""

    specs: tuple[ToolSpec, ...] = ()
    prefix: str = ""


def remove_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {remove_surrogates(key): remove_surrogates(item) for key, item in value.items()}
    return [remove_surrogates(item) for item in value] if isinstance(value, list) else value


def check_model_name(model: str, backend: ModelBackend) -> None:
    if model and not backend.accepts_model(model):
        message = f"unknown model {model!r}; write {backend.name!r}"
        raise RequestError(message, "model", "model_not_found", 404)


def parse_messages(messages: Any) -> list[Message]:
    """Messages in OpenAI's format; the role `developer` becomes `system`."""
    _check_tool_arguments(messages)
    renamed = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages]
    try:
        parsed = list(read_messages(remove_surrogates(renamed), "messages"))
    except (ValueError, RecursionError) as error:
        raise RequestError(str(error), "messages") from error
    _check_names("messages", [name for one in parsed for name in (one.name, one.tool_call_id) if name])
    _check_names("messages", [name for one in parsed for call in one.tool_calls for name in (call.id, call.name)])
    return parsed


def _check_names(param: str, names: Sequence[str]) -> None:
    """Bound names and ids: they are tokenized, compared and stored more often than other text."""
    if names and max(map(len, names)) > MAX_NAME_CHARS:
        raise RequestError(f"{param}: a name or an id has more than {MAX_NAME_CHARS} characters", param)


def _check_tool_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Arguments of tool calls are JSON in a string. All of them together have the bounds of one body."""
    left = DEFAULT_BOUNDS.costly
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if not isinstance(arguments, str):
                continue
            try:
                left -= check_json(arguments.encode("utf-8", "surrogatepass"), JsonBounds(costly=left))
            except JsonBoundsError as error:
                message_text = f"the arguments of all tool calls exceed the bounds of one request: {error}"
                raise RequestError(message_text, "messages", TOO_COMPLEX) from error


def select_tools(tools: Any, choice: ToolChoice | str | None, backend: ModelBackend) -> ToolSelection:
    """The tools of a request, and the prefix that forces a call where `tool_choice` demands one."""
    try:
        specs = read_tools(remove_surrogates(tools), "tools") if tools else ()
    except (ValueError, RecursionError) as error:
        raise RequestError(str(error), "tools") from error
    _check_names("tools", [spec.name for spec in specs])
    if choice == "none":
        return ToolSelection()
    if choice in (None, "auto"):
        return ToolSelection(specs)
    allowed = specs
    if isinstance(choice, ToolChoice):
        name = choice.name if choice.function is None else choice.function.name
        allowed = tuple(spec for spec in specs if spec.name == name)
        if not allowed:
            raise RequestError(f"tool_choice: there is no tool {name!r} in tools", "tool_choice")
    if not allowed:
        raise RequestError("tool_choice: tools is empty", "tool_choice")
    return ToolSelection(specs, forced_call_prefix(backend.renderer, allowed))


def encode_prompt(prompt: str | Sequence[int], backend: ModelBackend) -> list[int]:
    """The token ids of a prompt. A text that cannot fit is rejected before all of it is tokenized."""
    if not isinstance(prompt, str):
        return list(prompt)
    text, tokenizer, limit = replace_surrogates(prompt), TextTokenizer(backend.renderer.tokenizer), backend.max_context
    if has_more_tokens(text, tokenizer.encode, limit):
        raise RequestError(f"the prompt has more tokens than the context of {limit}", "prompt", CONTEXT_LENGTH_EXCEEDED)
    ids = tokenizer.encode(text)
    if len(ids) >= limit:  # before the next prompt is tokenized
        message = f"the prompt has {len(ids)} tokens and fills the context of {limit}"
        raise RequestError(message, "prompt", CONTEXT_LENGTH_EXCEEDED)
    return ids


def schema_of(body: SamplingRequest) -> str:
    """The JSON schema of the answer, as `Sampling.schema`."""
    chosen = getattr(body, "response_format", None)
    return "" if chosen is None else replace_surrogates(chosen.schema_text())


def generation_request(
    body: SamplingRequest,
    backend: ModelBackend,
    max_tokens: int | None,
    seconds: float | None,
    top_logprobs: int = 0,
    prefix: str = "",
) -> GenerationRequest:
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
    fields = {name: getattr(body, name, None) for name in names}
    changes = {name: value for name, value in fields.items() if value is not None}
    seed = None
    if isinstance(body, CompletionOptions):
        changes["stop_texts"], seed = body.stops, body.seed
    if schema := schema_of(body):
        if getattr(body, "tools", None) and getattr(body, "tool_choice", None) != "none":
            message = "response_format is not supported together with tools: leave one of them out"
            raise RequestError(message, "response_format")
        changes["schema"] = schema
    sampling: Sampling = replace(
        backend.sampling,
        max_tokens=max_tokens or UNLIMITED_TOKENS,
        seed=secrets.randbits(63) if seed is None else seed,
        seconds=seconds,
        **changes,
    )
    # A prefix separates sessions of users from those that the engine's own callers use.
    return GenerationRequest(sampling, top_logprobs, prefix, f"user {body.user}" if body.user else "")


def choice_options(body: Any, tools: ToolSelection, backend: ModelBackend) -> ChoiceOptions:
    stops = body.stops if isinstance(body, CompletionOptions) else ()
    parser = backend.renderer.parser if tools.specs else None
    return ChoiceOptions(stops, parser, tools.prefix, not getattr(body, "parallel_tool_calls", True))


def repeat_with_seeds(request: GenerationRequest, count: int) -> list[GenerationRequest]:
    """The request `count` times, with the seeds seed, seed + 1, …"""
    sampling = request.sampling
    return [replace(request, sampling=replace(sampling, seed=sampling.seed + i)) for i in range(count)]
