"""From a request's body to what is asked of a source."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request

from arborl.chat.messages import read_messages, read_tools
from arborl.serve.choices import Choice, Delta, Manner, forced
from arborl.serve.schemas import Drawing, Sampled
from arborl.serve.source import Asked, Refused, Source, Unavailable
from arborl.tools.protocol import encodable
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
        return encodable(value)
    if isinstance(value, dict):
        return {clean(key): clean(one) for key, one in value.items()}
    return [clean(one) for one in value] if isinstance(value, list) else value


def check_model(asked: str, source: Source) -> None:
    if asked and not source.answers_to(asked):
        raise Refused(f"no model is called {asked!r} here; write {source.name!r}", "model", "model_not_found", 404)


def messages_of(given: Any) -> list[Message]:
    """Messages in OpenAI's shape; `developer` is what newer clients call the system."""
    named = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in clean(given)]
    try:
        return list(read_messages(named, "messages"))
    except (ValueError, RecursionError) as error:
        raise Refused(str(error), "messages") from error


def tools_of(given: Any, choice: Any, source: Source) -> Tools:
    """The tools that the model is told of, and whether it must call one of them."""
    try:
        specs = read_tools(clean(given), "tools") if given else ()
    except (ValueError, RecursionError) as error:
        raise Refused(str(error), "tools") from error
    if choice == "none":
        return Tools()
    if choice in (None, "auto"):
        return Tools(specs)
    named = specs
    if choice != "required":
        function = choice.get("function", choice) if choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        named = tuple(spec for spec in specs if spec.name == name)
        if not named:
            raise Refused(f"tool_choice: there is no tool {name!r} among the tools", "tool_choice")
    if not named:
        raise Refused("tool_choice: there are no tools to choose from", "tool_choice")
    return Tools(specs, forced(source.renderer, named))


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
