"""Clients of tool servers and of servers that run code: their tools have the interface of local tools."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from arborl.errors import ArborError, ConfigError, EpisodeError, boundary, did_you_mean, paused_deadlines
from arborl.retry import BUSY_STATUS, CircuitBreaker, backoff_waits
from arborl.tools.core.arguments import ArgumentError
from arborl.tools.core.tool import CallLimiter, Tool, as_text
from arborl.tools.core.tool_context import ToolContext, truncate
from arborl.tools.remote.http_connections import ConnectionBroken, HttpConnections, HttpReply
from arborl.tools.remote.tool_protocol import CallRequest, CallResponse, ToolDescription, bearer_header
from arborl.types import ToolResult

RETRIED_STATUS = (429, 502, 503, 504)
PROBE_CODE = "print(6 * 7)"
DESCRIPTIONS = TypeAdapter(list[ToolDescription])


class ToolServerUnavailable(ArborError):
    """The tool server did not respond within the timeouts; the message contains the last reason."""


class _RequestRefused(ArborError):
    """The server refused the request; a retry cannot help."""


class ToolClient:
    """A client of `arborl tools serve`.

    Example:
        client = ToolClient("http://127.0.0.1:30003")
        toolbox = Toolbox(client.tools())
        …
        await client.close()                           # waits for running calls

    All retries of a call have the same idempotency key, so the server runs it once.

    Args:
        url: server address; by default the environment variable ARBORL_TOOL_SERVER.
        api_key: by default the environment variable ARBORL_TOOL_API_KEY.
        concurrency: concurrent requests.
        attempt_seconds: timeout of one request.
        call_seconds: timeout of one call with all retries.
        limit: every attempt waits for it. Waits for the limit and for `concurrency` do not count towards timeouts.
        retries: attempts after the first; by default as many as fit into `call_seconds`.
        backoff: seconds before the first retry; doubled with each up to 5.
    """

    retried_status: Sequence[int] = RETRIED_STATUS

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        concurrency: int = 64,
        attempt_seconds: float = 60.0,
        call_seconds: float = 120.0,
        limit: CallLimiter | None = None,
        backoff: float = 0.1,
        retries: int | None = None,
    ):
        url = url or os.environ.get("ARBORL_TOOL_SERVER")
        if not url:
            raise ConfigError("no tool server: give url='http://HOST:PORT', or set ARBORL_TOOL_SERVER.")
        if concurrency < 1:
            raise ConfigError(f"ToolClient: concurrency={concurrency}: give 1 or more")
        self.url = url.rstrip("/")
        HttpConnections(self.url)  # raises for an invalid address
        self.name = uuid.uuid4().hex[:12]
        self.concurrency, self.attempt_seconds, self.call_seconds = concurrency, attempt_seconds, call_seconds
        self.limit, self.retries, self.backoff = limit, retries, backoff
        key = api_key if api_key is not None else os.environ.get("ARBORL_TOOL_API_KEY")
        self._headers = bearer_header(key)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = weakref.WeakKeyDictionary()
        self._closed = False

    def tools(self, only: Sequence[str] | None = None) -> list[RemoteTool]:
        """All tools of the server, or the named ones. Blocks for one request; call it before the run."""
        try:
            response = httpx.get(f"{self.url}/tools", headers=self._headers, timeout=10.0)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"no tool server answers at {self.url} ({type(error).__name__}: {error}). "
                "Start one: arborl tools serve --tools calculator,python"
            ) from error
        if response.status_code == 401:
            raise ConfigError(f"tool server at {self.url} needs another API key: api_key=…, or ARBORL_TOOL_API_KEY.")
        try:
            response.raise_for_status()
            descriptions = DESCRIPTIONS.validate_json(response.content)
        except (httpx.HTTPError, ValidationError) as error:
            raise ConfigError(f"{self.url} is not a tool server: {error}") from error
        names = [one.name for one in descriptions]
        if missing := [name for name in only or () if name not in names]:
            near = did_you_mean(missing[0], names)
            raise ConfigError(f"tool server {self.url} has no tool {missing[0]!r}.{near} It has: {', '.join(names)}.")
        return [RemoteTool(self, one) for one in descriptions if only is None or one.name in only]

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        session: str | None = None,
        fields: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> ToolResult:
        """Run one call. A server that refuses or does not respond gives a failed result."""
        if self._closed:
            return ToolResult(f"{name}: the tool client is closed", False, "unavailable")
        start = time.perf_counter()
        try:
            request = CallRequest(
                name=name, arguments=dict(arguments), session=session, fields=dict(fields or {}),
                key=key or uuid.uuid4().hex,
            )  # fmt: skip
            body = request.model_dump_json().encode()
        except (ValueError, TypeError) as error:
            return ToolResult(f"{name}: the arguments have no JSON form: {error}", False, "arguments")
        try:
            return CallResponse.model_validate_json(await self.request("/call", body)).result()
        except _RequestRefused as error:
            return ToolResult(f"{name}: {error}", False, "refused", time.perf_counter() - start)
        except (ArborError, ValidationError) as error:
            return ToolResult(f"{name}: {error}", False, "unavailable", time.perf_counter() - start)

    async def request(self, path: str, body: bytes, method: str = "POST") -> bytes:
        """Send one request with retries. Raises `ToolServerUnavailable` or `_RequestRefused`."""
        state, server = self._loop_state(), f"the tool server at {self.url}"
        reason, limit = "no attempt was made", f"{self.call_seconds:g} s"
        try:
            async with boundary(server, self.call_seconds), state.slot():
                waits = backoff_waits(self.retries, self.backoff, 5.0, jitter=0.5)
                for pause in itertools.chain(waits, [None]):
                    data, reason, wait = await self._attempt(state, method, path, body)
                    if data is not None:
                        return data
                    if pause is not None:
                        await asyncio.sleep(max(wait, pause))
                limit = f"{self.retries} retries"
        except EpisodeError as error:
            if not isinstance(error.cause, TimeoutError):
                raise error.cause from None
        raise ToolServerUnavailable(f"{server} did not respond within {limit} ({reason})")

    async def _attempt(self, state: _LoopState, method: str, path: str, body: bytes) -> tuple[bytes | None, str, float]:
        """The response body; or None, the reason, and the server's Retry-After."""
        breaker = state.breaker
        await breaker.acquire()
        finished = False
        try:
            if self.limit is not None:
                with paused_deadlines():
                    await self.limit.acquire()
            async with asyncio.timeout(self.attempt_seconds):
                reply = await state.connections.request(method, path, body)
            finished = True
        except (ConnectionBroken, TimeoutError) as error:
            finished = True
            breaker.record_failure()
            reason = str(error) if isinstance(error, ConnectionBroken) else f"timeout of {self.attempt_seconds:g} s"
            return None, reason, 0.0
        finally:
            if not finished:
                breaker.cancel()
        if reply.status in self.retried_status and reply.status != 429:
            breaker.record_failure()
        else:
            breaker.record_success()
        if reply.status < 300:
            problem = self.body_problem(reply.body)
            return (reply.body, "", 0.0) if problem is None else (None, problem, 0.0)
        detail = f"{reply.status}: {_error_detail(reply)}"
        if reply.status not in self.retried_status:
            raise _RequestRefused(f"the tool server refused: {detail}")
        return None, detail, _parse_seconds(reply.headers.get("retry-after"))

    def body_problem(self, body: bytes) -> str | None:
        """Why the body of a response is to be requested again; None if it is not."""
        return None

    async def end_session(self, session: str) -> None:
        """Close a session on the server. On failure the server closes it after an hour."""
        try:
            await self.request(f"/sessions/{session}", b"", "DELETE")
        except ArborError:
            return

    async def close(self, seconds: float = 10.0) -> None:
        self._closed = True
        state = self._loops.pop(asyncio.get_running_loop(), None)
        if state is not None:
            await state.drain(seconds)

    def _loop_state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _LoopState(self)
        return self._loops[loop]


class RemoteTool:
    """A tool of a server."""

    def __init__(self, client: ToolClient, description: ToolDescription):
        self.client, self.description = client, description
        self.name, self.spec = description.name, description.spec
        self.stateful, self.terminal = description.stateful, description.terminal

    def __repr__(self) -> str:
        return f"RemoteTool({self.name!r}, {self.client.url!r})"

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        if context is None:
            return await self.client.call(self.name, arguments)
        session = None
        if self.stateful:
            name = f"{self.client.name}-{context.id}"
            session = context.state(self.client, lambda: _RemoteSession(self.client, name)).name
        fields = {name: context.fields[name] for name in self.description.fields if name in context.fields}
        return await self.client.call(self.name, arguments, session, fields)


class CodeServerClient(ToolClient):
    """A client of a server that runs code: `POST /execute` with `{"code": …}`, answered by `{"output": …, "error": …,
    "success": …}`. Without `success`, code without an error was successful.

    A retry runs the code again: the server knows no keys of calls. Server errors, timeouts and replies that are no JSON
    object are retried.

    Args:
        url: server address, without `/execute`.
        api_key: sent as `Authorization: Bearer …`; by default none.
        code_prefix: text before every code.
        options: arguments of `ToolClient`.
    """

    retried_status = BUSY_STATUS

    def __init__(self, url: str, api_key: str | None = None, code_prefix: str = "", **options: Any):
        super().__init__(url.rstrip("/").removesuffix("/execute"), api_key or "", **options)
        self.code_prefix = code_prefix

    def tools(self, only: Sequence[str] | None = None) -> list[CodeServerTool]:  # type: ignore[override]
        """The tool `python`, after a test of the server. Blocks for one request; call it before the run."""
        try:
            body = {"code": PROBE_CODE}
            headers = {name.decode(): value.decode("latin-1") for name, value in self._headers.items()}
            response = httpx.post(f"{self.url}/execute", json=body, headers=headers, timeout=self.attempt_seconds)
        except httpx.HTTPError as error:
            raise ConfigError(f"no code server answers at {self.url} ({type(error).__name__}: {error}).") from error
        problem = self.body_problem(response.content)
        if response.status_code >= 300 or problem is not None:
            reason = problem if response.status_code < 300 else f"status {response.status_code}"
            raise ConfigError(f"{self.url}/execute does not run code ({reason}). Is it POST /execute of a code server?")
        return [CodeServerTool(self)]

    def body_problem(self, body: bytes) -> str | None:
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError):
            return f"the reply is not JSON: {body[:100]!r}"
        has_keys = isinstance(reply, dict) and reply.keys() & {"output", "error", "success"}
        return None if has_keys else f"the reply has neither output nor error: {body[:100]!r}"

    async def execute(self, code: str) -> ToolResult:
        """Run code. Code that fails is a successful call; a server that refuses or does not respond is not."""
        if self._closed:
            return ToolResult("the client of the code server is closed", False, "unavailable")
        start = time.perf_counter()
        try:
            reply = json.loads(await self.request("/execute", json.dumps({"code": self.code_prefix + code}).encode()))
        except _RequestRefused as error:
            return ToolResult(str(error), False, "refused", time.perf_counter() - start)
        except ArborError as error:
            return ToolResult(str(error), False, "unavailable", time.perf_counter() - start)
        return ToolResult(execution_text(reply), True, "ok", time.perf_counter() - start)


def execution_text(reply: Mapping[str, Any]) -> str:
    """Text for the model: the output, and the error of code that failed."""
    output, error = (as_text(reply.get(key) or "").rstrip("\n") for key in ("output", "error"))
    success = reply.get("success")
    if success or (success is None and not error):
        return output or "(no output)"
    return "\n".join(part for part in (output, "" if error in output else error) if part) or "the code failed"


class CodeServerTool(Tool):
    """Runs Python code on a code server. Every call begins anew."""

    def __init__(self, client: CodeServerClient):
        super().__init__(self.python, timeout=client.call_seconds)
        self.client = client

    async def python(self, code: str) -> str:
        """Run a Python program and read what it prints. Every call begins anew.

        Args:
            code: for example: x = 6; print(x * 7)
        """
        return (await self.client.execute(code)).content

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        try:
            code = self._arguments.check(arguments)["code"]
        except ArgumentError as error:
            return ToolResult(str(error), False, "arguments")
        result = await self.client.execute(code)
        tokenizer = None if context is None else context.tokenizer
        return replace(result, content=truncate(result.content, self.max_chars, self.max_tokens, tokenizer))


class _RemoteSession:
    """State of an episode on the server; closed with the episode."""

    def __init__(self, client: ToolClient, name: str):
        self.client, self.name = client, name

    async def close(self) -> None:
        await self.client.end_session(self.name)


class _LoopState:
    """Connections, concurrency limit and circuit breaker of one event loop."""

    def __init__(self, client: ToolClient):
        headers = {name.decode(): value.decode("latin-1") for name, value in client._headers.items()}
        self.connections = HttpConnections(client.url, headers)
        self.breaker = CircuitBreaker()
        self._semaphore = asyncio.Semaphore(client.concurrency)
        self._calls = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        self._calls += 1
        try:
            with paused_deadlines():
                await self._semaphore.acquire()
            try:
                yield
            finally:
                self._semaphore.release()
        finally:
            self._calls -= 1

    async def drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._calls and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.connections.close()


def _error_detail(reply: HttpReply) -> str:
    try:
        return str(json.loads(reply.body)["detail"])[:500]
    except (ValueError, KeyError, TypeError):
        return reply.body[:200].decode(errors="replace")


def _parse_seconds(text: str | None) -> float:
    try:
        return min(float(text or 0), 60.0)
    except ValueError:
        return 0.0
