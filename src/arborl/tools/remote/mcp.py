"""Tools of an MCP server (`McpClient`), and tools served over MCP."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from arborl.child_process import supervised_command
from arborl.errors import ArborError, ConfigError, did_you_mean
from arborl.retry import CircuitBreaker
from arborl.tools.core.tool import AnyTool
from arborl.tools.core.tool_context import ToolContext, truncate
from arborl.tools.remote.tool_dispatcher import ToolDispatcher
from arborl.tools.remote.tool_protocol import CallRequest
from arborl.types import ToolResult, ToolSpec

try:
    import anyio
    import mcp_types as types
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp.server import Server
except ImportError as missing:
    raise ConfigError(f"MCP needs the official SDK, version 2 or later ({missing}): install arborl[mcp]") from missing

log = logging.getLogger(__name__)
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)  # it logs a traceback for every invalid line

SESSION_KEY = "arborl/session"  # key of the episode in a call's `_meta`, for servers that keep state per episode


class McpClient:
    """A connection to an MCP server.

    Example:
        files = McpServer(["uvx", "mcp-server-git", "--repository", "."])
        search = McpServer("http://127.0.0.1:8000/mcp", headers={"Authorization": "Bearer …"})
        toolbox = Toolbox([*files.tools(), *search.tools()])
        …
        files.close()

    It runs in a separate thread; its tools can be used from any event loop. A broken connection is reopened at the next
    call; a command is then started again. No process of a command outlives this process (`arborl.child_process`).

    Args:
        server: a URL, or a command that uses MCP on its standard input and output.
        env: environment variables of the command, besides a safe selection of this process's.
        cwd: working directory of the command.
        headers: headers of every request to a URL.
        timeout: seconds per call.
        start_seconds: seconds for starting and connecting.
        stateful: whether calls of one turn run in the order written.
        only: names of the tools; by default all.
        max_tokens, max_chars: longer results are cut.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        stateful: bool = False,
        only: Sequence[str] | None = None,
        max_tokens: int = 512,
        max_chars: int = 4000,
        cwd: str | Path | None = None,
        start_seconds: float = 60.0,
    ):
        if not server:
            raise ConfigError("McpServer: give a URL, or a command as a list of words")
        self.server, self.cwd = server, cwd
        self.env, self.headers, self.timeout = dict(env or {}), dict(headers or {}), timeout
        self.stateful, self.only, self.start_seconds = stateful, only, start_seconds
        self.max_tokens, self.max_chars = max_tokens, max_chars
        self.name = uuid.uuid4().hex[:12]
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"arborl-mcp-{self}", daemon=True).start()
        self._connection: _McpConnection | None = None
        self._connection_tasks: set[asyncio.Task[None]] = set()
        self._breaker = CircuitBreaker(failures=2)
        self._closed, self._num_failures = False, 0

    def __str__(self) -> str:
        return self.server if isinstance(self.server, str) else " ".join(self.server)

    def tools(self) -> list[McpTool]:
        """The server's tools. Blocks until it responds; call it before the run."""
        self._check_command()
        try:
            listed = asyncio.run_coroutine_threadsafe(self._list(), self._loop).result(2 * self.start_seconds + 10)
        except Exception as error:
            raise ConfigError(f"no MCP server answers at {self}: {_reason(error)}") from error
        names = [each.name for each in listed]
        if missing := [name for name in self.only or () if name not in names]:
            near = did_you_mean(missing[0], names)
            raise ConfigError(f"the MCP server {self} has no tool {missing[0]!r}.{near} It has: {', '.join(names)}.")
        return [McpTool(self, each) for each in listed if self.only is None or each.name in self.only]

    def _check_command(self) -> None:
        if isinstance(self.server, str):
            return
        if self.cwd is not None and not os.path.isdir(self.cwd):
            raise ConfigError(f"cwd={str(self.cwd)!r} of {self} is not a folder.")
        program = self.server[0]
        found = os.path.join(self.cwd or "", program) if os.path.dirname(program) else program
        if shutil.which(found, path=self.env.get("PATH")) is None:
            raise ConfigError(f"program {program!r} not found. Is it installed and on PATH?")

    async def call(self, name: str, arguments: Mapping[str, Any], session: str | None = None) -> ToolResult:
        """Run one call. A failure of the server is a failed result."""
        start = time.perf_counter()
        if self._closed:
            return ToolResult(f"{name}: the MCP server {self} is closed", False, "unavailable")
        try:
            job = asyncio.run_coroutine_threadsafe(self._call(name, dict(arguments), session), self._loop)
            content, kind = await asyncio.wrap_future(job)
        except TimeoutError:
            content, kind = f"{name}: TimeoutError: took longer than {self.timeout:g} s", "timeout"
        except MCPError as error:
            content, kind = f"{name}: {error}", "exception"
        except Exception as error:
            content, kind = f"{name}: the MCP server {self} does not respond: {_reason(error)}", "unavailable"
        return ToolResult(content, kind == "ok", kind, time.perf_counter() - start)

    def close(self) -> None:
        """Close the connection and end the command. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(15)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _list(self) -> list[types.Tool]:
        client = (await self._connect()).client
        found: list[types.Tool] = []
        async with asyncio.timeout(self.start_seconds):
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return found

    async def _call(self, name: str, arguments: dict[str, Any], session: str | None) -> tuple[str, str]:
        meta: Any = {SESSION_KEY: session} if session else None
        connection = await self._connect()
        try:
            async with asyncio.timeout(self.timeout):
                result = await connection.client.call_tool(name, arguments, meta=meta)
        except MCPError as error:
            if error.error.code != types.CONNECTION_CLOSED and error.error.message != "Session terminated":
                raise
            await self._drop(connection)
            raise ConnectionError(str(error)) from error
        except (asyncio.CancelledError, TimeoutError):
            raise
        except Exception:
            await self._drop(connection)
            raise
        return _text(result), "exception" if result.is_error else "ok"

    async def _connect(self) -> _McpConnection:
        """The connection, opened if there is none. A caller's timeout does not cancel it for the others."""
        try:
            async with asyncio.timeout(self.start_seconds):
                if self._connection is None:
                    await self._breaker.acquire()
                    if self._connection is None:
                        self._connection = _McpConnection(self._transport, self.start_seconds)
                        self._connection.ready.add_done_callback(self._record_connection)
                        self._connection_tasks.add(self._connection.task)
                        self._connection.task.add_done_callback(self._connection_tasks.discard)
                    else:
                        self._breaker.cancel()
                connection = self._connection
                await asyncio.shield(connection.ready)
                return connection
        except TimeoutError as error:
            raise ConnectionError(f"no response in {self.start_seconds:g} s") from error

    def _record_connection(self, ready: asyncio.Future[None]) -> None:
        if ready.cancelled() or ready.exception() is not None:
            self._connection = None
            self._breaker.record_failure()
        else:
            self._breaker.record_success()

    def _transport(self, errors: TextIO) -> Any:
        if not isinstance(self.server, str):
            program, *words = supervised_command(list(self.server))
            return stdio_client(StdioServerParameters(command=program, args=words, env=self.env, cwd=self.cwd), errors)
        if not self.headers:
            return self.server
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        return streamable_http_client(self.server, http_client=create_mcp_http_client(headers=self.headers))

    async def _drop(self, connection: _McpConnection) -> None:
        """Close a broken connection; a newer one stays."""
        if self._connection is not connection:
            return
        self._connection = None
        await connection.close()
        self._num_failures += 1
        if self._num_failures in (1, 10, 100, 1000):
            again = f", for the {self._num_failures}th time" if self._num_failures > 1 else ""
            output = f" Its last line: {connection.last_line}" if connection.last_line else ""
            log.warning("the MCP server %s has ended%s; the next call starts it again.%s", self, again, output)

    async def _end(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._connection_tasks:
            await asyncio.wait(self._connection_tasks, timeout=12)


class _McpConnection:
    """Opens and closes in one task, as the SDK's cancel scopes require."""

    def __init__(self, transport: Callable[[TextIO], Any], seconds: float):
        self.client: Client
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._scope: anyio.CancelScope | None = None
        self.last_line = ""
        self.task = asyncio.create_task(self._run(transport, seconds))

    async def _run(self, transport: Callable[[TextIO], Any], seconds: float) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            failure: BaseException | None = None
            try:
                with anyio.fail_after(seconds) as self._scope:
                    async with Client(transport(errors)) as self.client:
                        self._scope.deadline = math.inf
                        self.ready.set_result(None)
                        await self._stop.wait()
            except BaseException as error:
                failure = error
            errors.seek(0)
            self.last_line = next((line.strip() for line in reversed(errors.readlines()) if line.strip()), "")[:300]
        if not self.ready.done():
            late = isinstance(failure, TimeoutError)
            reason = f"no response in {seconds:g} s" if late else _reason(failure or EOFError())
            self.ready.set_exception(
                ConnectionError(f"{reason}. Its last line: {self.last_line}" if self.last_line else reason)
            )

    async def close(self) -> None:
        self._stop.set()
        if not self.ready.done() and self._scope is not None:
            self._scope.cancel()  # cancelling the task would skip the SDK's cleanup
        await asyncio.wait([self.task], timeout=12)


class McpTool:
    """A tool of an MCP server."""

    def __init__(self, client: McpClient, tool: types.Tool):
        self.client, self.name = client, tool.name
        self.spec = ToolSpec(tool.name, tool.description or "", dict(tool.input_schema))
        self.stateful, self.terminal = client.stateful, False

    def __repr__(self) -> str:
        return f"McpTool({self.name!r}, {str(self.client)!r})"

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        client, tokenizer = self.client, context.tokenizer if context else None
        result = await client.call(self.name, arguments, f"{client.name}-{context.id}" if context else None)
        content = truncate(result.content, client.max_chars, client.max_tokens, tokenizer)
        return ToolResult(content, result.ok, result.kind, result.seconds)


def _text(result: types.CallToolResult) -> str:
    """The text parts; other parts by their type, such as `[image]`."""
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    return "\n".join(parts) or (str(result.structured_content) if result.structured_content else "")


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def make_server(dispatcher: ToolDispatcher) -> Server[Any]:
    """An MCP server. The state of stateful tools lasts as long as the connection."""
    fallback = f"mcp-{uuid.uuid4().hex[:12]}"

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        offered = [
            types.Tool(name=each.name, description=each.description, input_schema=each.parameters)
            for each in dispatcher.descriptions()
        ]
        return types.ListToolsResult(tools=offered)

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        headers = getattr(context.request, "headers", {}) or {}
        meta = context.meta or {}
        session = meta.get(SESSION_KEY) or headers.get("mcp-session-id") or (None if context.request else fallback)
        try:
            request = CallRequest(name=params.name, arguments=params.arguments or {}, session=session)
            response = await dispatcher.call(request)
        except (ArborError, ValueError) as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)
        text = types.TextContent(type="text", text=response.content)
        return types.CallToolResult(content=[text], is_error=not response.ok)

    return Server("arborl", on_list_tools=list_tools, on_call_tool=call_tool)


def serve_stdio(tools: Sequence[AnyTool]) -> None:
    from mcp.server.stdio import stdio_server

    async def run() -> None:
        dispatcher = ToolDispatcher(tools)
        server = make_server(dispatcher)
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())
        await dispatcher.drain(5)

    asyncio.run(run())


def mcp_endpoint(dispatcher: ToolDispatcher) -> Callable[[Any], AsyncIterator[None]]:
    """Lifespan function that adds MCP over HTTP at `/mcp` to an application."""
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
    from starlette.routing import Route

    async def lifespan(app: Any) -> AsyncIterator[None]:
        manager = StreamableHTTPSessionManager(make_server(dispatcher))
        app.router.routes.append(Route("/mcp", endpoint=StreamableHTTPASGIApp(manager)))
        async with manager.run():
            yield

    return lifespan
