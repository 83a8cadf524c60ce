"""From a request's body to what is asked of a source."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request

from arborl.chat.conversation import has_more_tokens
from arborl.chat.messages import read_messages, read_tools
from arborl.chat.tokenizer import TextTokenizer
from arborl.serve.choices import Choice, Delta, Manner, forced
from arborl.serve.parsing import TOO_COMPLEX
from arborl.serve.schemas import LONGEST_NAME, Drawing, Sampled, ToolChoice
from arborl.serve.source import TOO_LONG, Asked, Refused, Source, Unavailable
from arborl.tools.core.json_bounds import DEFAULT_BOUNDS, JsonBounds, JsonBoundsError, check_json
from arborl.tools.remote.tool_protocol import replace_surrogates
from arborl.types import Message, Sampling, ToolSpec

T = TypeVar("T")
WHATEVER_FITS = 2**31 - 1
LOOK = 1.0
"""Seconds between two looks whether a client that waits is still there."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model may call."""

    specs: tuple[ToolSpec, ...] = ()
    begins: str = ""
    """What an answer that must call one begins with."""


def clean(value: Any) -> Any:
    """The same without what UTF-8 has no form for, in a text wherever it stands."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {clean(key): clean(one) for key, one in value.items()}
    return [clean(one) for one in value] if isinstance(value, list) else value


def check_model(asked: str, source: Source) -> None:
    if asked and not source.answers_to(asked):
        raise Refused(f"no model is called {asked!r} here; write {source.name!r}", "model", "model_not_found", 404)


def messages_of(given: Any) -> list[Message]:
    """Messages in OpenAI's shape; `developer` is what newer clients call the system."""
    check_arguments(given)
    named = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in clean(given)]
    try:
        messages = list(read_messages(named, "messages"))
    except (ValueError, RecursionError) as error:
        raise Refused(str(error), "messages") from error
    check_names("messages", [name for one in messages for name in (one.name, one.tool_call_id) if name])
    check_names("messages", [name for one in messages for call in one.tool_calls for name in (call.id, call.name)])
    return messages


def check_names(param: str, names: Sequence[str]) -> None:
    """Names and ids are short: they are tokenised, compared and kept more often than other text."""
    if names and max(map(len, names)) > LONGEST_NAME:
        raise Refused(f"{param}: a name or an id has more than {LONGEST_NAME} characters", param)


def check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Arguments of tool calls are JSON in a string. They have the bounds of a body, all of them together."""
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
                told = "the arguments of all tool calls exceed the bounds of one request"
                raise Refused(f"{told}: {error}", "messages", TOO_COMPLEX) from error


def tools_of(given: Any, choice: ToolChoice | str | None, source: Source) -> Tools:
    """The tools that the model is told of, and whether it must call one of them."""
    try:
        specs = read_tools(clean(given), "tools") if given else ()
    except (ValueError, RecursionError) as error:
        raise Refused(str(error), "tools") from error
    check_names("tools", [spec.name for spec in specs])
    if choice == "none":
        return Tools()
    if choice in (None, "auto"):
        return Tools(specs)
    named = specs
    if isinstance(choice, ToolChoice):
        name = choice.name if choice.function is None else choice.function.name
        named = tuple(spec for spec in specs if spec.name == name)
        if not named:
            raise Refused(f"tool_choice: there is no tool {name!r} among the tools", "tool_choice")
    if not named:
        raise Refused("tool_choice: there are no tools to choose from", "tool_choice")
    return Tools(specs, forced(source.renderer, named))


def tokens_of(prompt: str | Sequence[int], source: Source) -> list[int]:
    """The ids of a prompt. A text that cannot fit is refused before all of it is tokenised."""
    if not isinstance(prompt, str):
        return list(prompt)
    text, tokenizer = replace_surrogates(prompt), TextTokenizer(source.renderer.tokenizer)
    if has_more_tokens(text, tokenizer.encode, source.context):
        raise Refused(f"the prompt has more tokens than the context of {source.context}", "prompt", TOO_LONG)
    ids = tokenizer.encode(text)
    if len(ids) >= source.context:  # before the prompts behind it are tokenised
        raise Refused(f"the prompt has {len(ids)} tokens and the context {source.context}", "prompt", TOO_LONG)
    return ids


def session_of(body: Drawing) -> str:
    """The session of an engine. Its names are apart from those that the engine's own callers use."""
    return f"user {body.user}" if body.user else ""


def sampling_of(body: Drawing, source: Source, most: int | None, seconds: float | None) -> Sampling:
    """How to draw: as the request says, else as the model is used to."""
    said = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    own = {name: value for name, value in said.items() if value is not None}
    if isinstance(body, Sampled):
        own["stop_texts"] = body.stops
    seed = body.seed if isinstance(body, Sampled) and body.seed is not None else secrets.randbits(63)
    return replace(source.sampling, max_tokens=most or WHATEVER_FITS, seed=seed, seconds=seconds, **own)


def manner_of(body: Any, tools: Tools, source: Source) -> Manner:
    stops = body.stops if isinstance(body, Sampled) else ()
    parser = source.renderer.parser if tools.specs else None
    return Manner(stops, parser, tools.begins, not getattr(body, "parallel_tool_calls", True))


def several(asked: Asked, count: int) -> list[Asked]:
    """The same, each with its own chance; the first with the seed itself."""
    return [replace(asked, sampling=replace(asked.sampling, seed=asked.sampling.seed + i)) for i in range(count)]


async def merged(choices: Sequence[Choice]) -> AsyncIterator[tuple[Choice, Delta]]:
    """What is new of any choice, as it comes."""
    if len(choices) == 1:
        async with aclosing(choices[0].deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield choices[0], delta
        return
    news: asyncio.Queue[tuple[Choice, Delta] | Exception | None] = asyncio.Queue()

    async def tell(choice: Choice) -> None:
        try:
            async for delta in choice.deltas():
                news.put_nowait((choice, delta))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    tasks = [asyncio.create_task(tell(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            new = await news.get()
            if isinstance(new, Exception):
                raise new
            if new is None:
                left -= 1
            else:
                yield new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def attended(request: Request, work: Awaitable[T]) -> T:
    """What `work` comes to, given up where the client leaves."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            if await request.is_disconnected():
                raise Unavailable("the client has left", status=499)
        return task.result()
    finally:
        task.cancel()
