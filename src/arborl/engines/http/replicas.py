"""One server of several: what is known of it, and what it is asked besides completions."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

import httpx

from arborl.chat import Renderer
from arborl.engines.copies import label_of, versions_of
from arborl.engines.draw_tokens import StopTexts
from arborl.engines.http.servers import ChatServer, Client, Facts, Piece, Server
from arborl.engines.replicas import Replica, Unreachable
from arborl.errors import EngineError

CONNECT = 10.0
"""Seconds to reach a server."""
KEPT = 2.0
"""Seconds that a connection is kept: shorter than servers do (5), or a request would meet one that is just closed."""
WORDS = "Hello, world! 12 + 30 = 42\n\tdef f(x): return x ** 2  # éß 你好"
"""A text that two tokenizers are not likely to cut alike."""


@dataclass(eq=False, slots=True)
class ServerReplica(Replica):
    """One server; its name is its address."""

    server: Server | None = None
    facts: Facts | None = None

    @property
    def url(self) -> str:
        return self.name


@dataclass(slots=True)
class Clients:
    """Connections of one event loop, by address."""

    loop: asyncio.AbstractEventLoop
    by_url: dict[str, Client] = field(default_factory=dict)


def client_of(url: str, headers: dict[str, str], seconds: float, requests: int) -> Client:
    """Connections to a server that a request may take `seconds` of, as many as there are requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=requests, keepalive_expiry=KEPT)
    timeout = httpx.Timeout(seconds, connect=CONNECT)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)


async def compare_tokenizers(replica: ServerReplica, client: Client, renderer: Renderer) -> None:
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
    replica: ServerReplica, client: Client, last: Piece, count: int, began_at: int | None, run: str
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
