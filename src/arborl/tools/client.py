"""Tools that another process runs, with the interface of those of this one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from arborl.errors import ArborError, ConfigError, EpisodeError, boundary, did_you_mean, paused_deadlines
from arborl.tools.breaker import Breaker
from arborl.tools.http import Broken, Connections, Reply
from arborl.tools.injection import Context
from arborl.tools.protocol import About, CallAnswer, CallRequest, bearer
from arborl.tools.tool import Limit
from arborl.types import ToolResult

RETRIED = (429, 502, 503, 504)
ABOUTS = TypeAdapter(list[About])


class Unavailable(ArborError):
    """The tool server did not answer within the caller's patience; the last reason is in the message."""


class _Refused(ArborError):
    """The server answered that it will not; asking again will not help."""


class ToolClient:
    """Talks to a tool server (`arborl tools serve`).

    Example:
        client = ToolClient("http://127.0.0.1:30003")
        toolbox = Toolbox(client.tools())              # like any other tools
        …
        await client.close()                           # after the calls under way

    A call carries a key of its own through all its retries, so the server runs it once.

    Args:
        url: of the server; by default the environment's ARBORL_TOOL_SERVER.
        api_key: by default the environment's ARBORL_TOOL_API_KEY.
        concurrency: requests under way at a time, and connections kept.
        attempt_seconds: patience with one request.
        call_seconds: patience with one call, retries and waiting included.
        limit: every attempt waits for it, so retries count. That wait, and the one for a turn where `concurrency` is
            used up, are no part of anybody's patience.
        retries: attempts after the first; by default as many as there is patience for.
        pause: seconds before the first retry, about; doubled with each, with chance, up to `longest_pause`.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        concurrency: int = 64,
        attempt_seconds: float = 60.0,
        call_seconds: float = 120.0,
        limit: Limit | None = None,
        pause: float = 0.1,
        longest_pause: float = 5.0,
        retries: int | None = None,
    ):
        url = url or os.environ.get("ARBORL_TOOL_SERVER")
        if not url:
            raise ConfigError("no tool server: give url='http://HOST:PORT', or set ARBORL_TOOL_SERVER.")
        if concurrency < 1:
            raise ConfigError(f"ToolClient: concurrency={concurrency}: give 1 or more")
        self.url = url.rstrip("/")
        Connections(self.url)  # an address that is none is said now
        self.name = uuid.uuid4().hex[:12]
        """Sets the sessions of this client apart from everybody else's."""
        self.concurrency, self.attempt_seconds, self.call_seconds = concurrency, attempt_seconds, call_seconds
        self.limit, self.pause, self.longest_pause, self.retries = limit, pause, longest_pause, retries
        key = api_key if api_key is not None else os.environ.get("ARBORL_TOOL_API_KEY")
        self._headers = bearer(key)
        self._lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = weakref.WeakKeyDictionary()
        self._closed = False

    # ------------------------------------------------------------------------------------------------ what there is

    def tools(self, only: Sequence[str] | None = None) -> list[RemoteTool]:
        """Every tool of the server, or those asked for. Blocks for one request: meant for the time before a run."""
        try:
            answer = httpx.get(f"{self.url}/tools", headers=self._headers, timeout=10.0)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"no tool server answers at {self.url} ({type(error).__name__}: {error}). "
                "Start one: arborl tools serve --tools calculator,python"
            ) from error
        if answer.status_code == 401:
            raise ConfigError(
                f"the tool server at {self.url} wants another API key: api_key=…, or ARBORL_TOOL_API_KEY."
            )
        try:
            answer.raise_for_status()
            abouts = ABOUTS.validate_json(answer.content)
        except (httpx.HTTPError, ValidationError) as error:
            raise ConfigError(f"{self.url} is not a tool server: {error}") from error
        names = [about.name for about in abouts]
        if missing := [name for name in only or () if name not in names]:
            near = did_you_mean(missing[0], names)
            raise ConfigError(
                f"the tool server at {self.url} has no tool {missing[0]!r}.{near} It has: {', '.join(names)}."
            )
        return [RemoteTool(self, about) for about in abouts if only is None or about.name in only]

    # ------------------------------------------------------------------------------------------------ calls

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        session: str | None = None,
        fields: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> ToolResult:
        """Answer one call. A server that refuses or cannot be reached is an answer too."""
        if self._closed:
            return ToolResult(f"{name}: the tool client is closed", False, "unavailable")
        start = time.perf_counter()
        try:
            request = CallRequest(
                name=name,
                arguments=dict(arguments),
                session=session,
                fields=dict(fields or {}),
                key=key or uuid.uuid4().hex,
            )
            body = request.model_dump_json().encode()
        except (ValueError, TypeError) as error:
            return ToolResult(f"{name}: the arguments have no JSON form: {error}", False, "arguments")
        try:
            data = await self.post("/call", body)
            return CallAnswer.model_validate_json(data).result()
        except _Refused as error:
            return ToolResult(f"{name}: {error}", False, "refused", time.perf_counter() - start)
        except (ArborError, ValidationError) as error:  # not there, or the limit is another's
            return ToolResult(f"{name}: {error}", False, "unavailable", time.perf_counter() - start)

    async def post(self, path: str, body: bytes, method: str = "POST") -> bytes:
        """One request, repeated while that can help. Raises `Unavailable`, or what says that it was refused."""
        line, where = self._line(), f"the tool server at {self.url}"
        reason, attempt = "no attempt was made", 0
        try:
            async with boundary(where, self.call_seconds), line.turn():
                while True:
                    data, reason, wait = await self._attempt(line, method, path, body)
                    if data is not None:
                        return data
                    if attempt == self.retries:
                        raise Unavailable(f"{where} did not answer, asked {attempt + 1} times ({reason})")
                    spread = min(self.pause * 2 ** min(attempt, 10), self.longest_pause)
                    await asyncio.sleep(max(wait, spread * random.uniform(0.5, 1.5)))
                    attempt += 1
        except EpisodeError as error:
            if not isinstance(error.cause, TimeoutError):
                raise error.cause from None
        raise Unavailable(f"{where} did not answer within {self.call_seconds:g} s ({reason})")

    async def _attempt(self, line: _Line, method: str, path: str, body: bytes) -> tuple[bytes | None, str, float]:
        """The answer; or None, why not, and how long the server asked to wait."""
        await line.breaker.enter()
        known = False
        try:
            if self.limit is not None:
                with paused_deadlines():
                    await self.limit.acquire()
            async with asyncio.timeout(self.attempt_seconds):
                answer = await line.http.request(method, path, body)
            known = True
        except Broken as error:
            known = True
            line.breaker.failed()
            return None, str(error), 0.0
        except TimeoutError:
            known = True
            line.breaker.failed()
            return None, f"no answer in {self.attempt_seconds:g} s", 0.0
        finally:
            if not known:
                line.breaker.left()
        if answer.status < 300:
            line.breaker.worked()
            return answer.body, "", 0.0
        detail = f"{answer.status}: {_detail(answer)}"
        if answer.status not in RETRIED:
            line.breaker.worked()
            raise _Refused(f"the tool server refused: {detail}")
        if answer.status == 429:
            line.breaker.worked()
        else:
            line.breaker.failed()
        return None, detail, _seconds(answer.headers.get("retry-after"))

    async def end_session(self, session: str) -> None:
        """Tell the server that an episode is over; one that cannot be told ends it after an hour by itself."""
        try:
            await self.post(f"/sessions/{session}", b"", "DELETE")
        except ArborError:
            return

    async def close(self, seconds: float = 10.0) -> None:
        """Take no more calls, wait for those under way, close the connections."""
        self._closed = True
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.drain(seconds)

    def _line(self) -> _Line:
        """The connections of this event loop: they cannot be used from another."""
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            self._lines[loop] = _Line(self)
        return self._lines[loop]


class RemoteTool:
    """A tool of a server, to be used as one's own."""

    def __init__(self, client: ToolClient, about: About):
        self.client, self.about = client, about
        self.name, self.spec = about.name, about.spec
        self.stateful, self.terminal = about.stateful, about.terminal

    def __repr__(self) -> str:
        return f"RemoteTool({self.name!r}, {self.client.url!r})"

    async def run(self, arguments: Mapping[str, Any], context: Context | None = None) -> ToolResult:
        """Answer one call. The episode's end ends its session on the server."""
        if context is None:
            return await self.client.call(self.name, arguments)
        session = None
        if self.stateful:
            session = context.state(self.client, lambda: _Session(self.client, f"{self.client.name}-{context.id}")).name
        fields = {name: context.fields[name] for name in self.about.fields if name in context.fields}
        return await self.client.call(self.name, arguments, session, fields)


class _Session:
    """An episode's state on the server; closed with the episode."""

    def __init__(self, client: ToolClient, name: str):
        self.client, self.name = client, name

    async def close(self) -> None:
        await self.client.end_session(self.name)


class _Line:
    """Connections, the cap on requests under way, and the breaker, of one event loop."""

    def __init__(self, client: ToolClient):
        headers = {name.decode(): value.decode("latin-1") for name, value in client._headers.items()}
        self.http = Connections(client.url, headers)
        self.breaker = Breaker()
        self._slots = asyncio.Semaphore(client.concurrency)
        self._under_way = 0

    def turn(self) -> _Turn:
        return _Turn(self)

    async def drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._under_way and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.http.close()


class _Turn:
    """One of the requests under way."""

    def __init__(self, line: _Line):
        self.line = line

    async def __aenter__(self) -> None:
        self.line._under_way += 1
        try:
            with paused_deadlines():
                await self.line._slots.acquire()
        except BaseException:
            self.line._under_way -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self.line._slots.release()
        self.line._under_way -= 1


def _detail(answer: Reply) -> str:
    try:
        return str(json.loads(answer.body)["detail"])[:500]
    except (ValueError, KeyError, TypeError):
        return answer.body[:200].decode(errors="replace")


def _seconds(text: str | None) -> float:
    try:
        return min(float(text or 0), 60.0)
    except ValueError:
        return 0.0
