"""One server of several: what is known of it, and what it is asked besides completions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from arborl.chat import Renderer
from arborl.engines.copies import label_of, versions_of
from arborl.engines.draw_tokens import StopTexts
from arborl.engines.http.servers import ChatServer, Client, Facts, Piece, Server, Unreachable
from arborl.errors import EngineError

CONNECT = 10.0
"""Seconds to reach a server."""
KEPT = 2.0
"""Seconds that a connection is kept: shorter than servers do (5), or a request would meet one that is just closed."""
WORDS = "Hello, world! 12 + 30 = 42\n\tdef f(x): return x ** 2  # éß 你好"
"""A text that two tokenizers are not likely to cut alike."""


@dataclass(eq=False, slots=True)
class Replica:
    """One server."""

    url: str
    server: Server | None = None
    facts: Facts | None = None
    up: bool = False
    version: int | None = None
    """Of the weights that it holds; None where they are not ours."""
    busy: int = 0
    """Requests under way."""
    why: str = ""
    """What was wrong when it was last tried."""


@dataclass(slots=True)
class Here:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    clients: dict[str, Client] = field(default_factory=dict)
    coming: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Attempts to get servers back."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when one is back."""


def client_of(url: str, headers: dict[str, str], seconds: float, requests: int) -> Client:
    """Connections to a server that a request may take `seconds` of, as many as there are requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=requests, keepalive_expiry=KEPT)
    timeout = httpx.Timeout(seconds, connect=CONNECT)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)


async def compare_tokenizers(replica: Replica, client: Client, renderer: Renderer) -> None:
    """That a server cuts a text as we do; one that only chats need not."""
    if isinstance(replica.server, ChatServer):
        return
    assert replica.server is not None
    assert replica.facts is not None
    theirs = await replica.server.encode(client, replica.facts.model, WORDS)
    ours = list(renderer.tokenizer.encode(WORDS))
    if theirs is not None and theirs != ours:
        raise EngineError(
            f"{replica.url} has another tokenizer: it cuts {WORDS[:13]!r}… into {len(theirs)} tokens, "
            f"{theirs[:4]}…, and model.name's into {len(ours)}, {ours[:4]}…. Serve the model that model.name is"
        )


async def versions_from(
    replica: Replica, client: Client, last: Piece, count: int, began_at: int | None, run: str
) -> list[int]:
    """The version that sampled each of `count` tokens; Unreachable where a server has forgotten our weights."""
    server = replica.server
    assert server is not None
    assert not isinstance(server, ChatServer)
    labels = [(label_of(label, run), begin, end) for label, begin, end in last.spans]
    known = [(version, begin, end) for version, begin, end in labels if version is not None]
    versions = versions_of(known, count)
    if count and len(versions) == count:
        return versions
    held = label_of(await server.label(client), run)
    if last.spans or held is None or began_at is None:
        replica.version = None
        raise Unreachable(f"{replica.url}: it was restarted, and holds other weights")
    return [began_at] * count


def said_it(stops: StopTexts, sampled: list[int]) -> bool:
    try:
        return stops.reached(sampled)
    except Exception as error:  # turning tokens into text is not our code: where it breaks, this request fails
        raise EngineError(f"decode failed on its tokens: {type(error).__name__}: {error}") from error


def key_of(variable: str) -> str:
    if not (found := os.environ.get(variable)):
        raise EngineError(f"engine.api_key_env={variable}: there is no such environment variable. Set it to the key")
    return found


def now(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, also where a loop is running already."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, work).result()
