"""MCP both ways: tools of an MCP server as ours, and ours as an MCP server. Needs the extra `mcp`."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from arborl.errors import ArborError, ConfigError, did_you_mean
from arborl.tools.breaker import Breaker
from arborl.tools.dispatcher import Desk
from arborl.tools.injection import Context
from arborl.tools.output import cut
from arborl.tools.protocol import CallRequest
from arborl.tools.tool import AnyTool
from arborl.types import ToolResult, ToolSpec

try:
    import anyio
    import mcp_types as types
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp.server import Server
except ImportError as missing:
    raise ConfigError(
        f"MCP needs the official SDK, version 2 or newer ({missing}): pip install 'arborl[mcp]'"
    ) from missing

log = logging.getLogger(__name__)
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)  # else a traceback for each line that is no answer

SESSION = "arborl/session"
"""Names the episode in a call's `_meta`, for servers that keep state by it; others do not look."""


class McpServer:
    """A connection to an MCP server.

    Example:
        files = McpServer(["uvx", "mcp-server-git", "--repository", "."])
        search = McpServer("http://127.0.0.1:8000/mcp", headers={"Authorization": "Bearer …"})
        toolbox = Toolbox([*files.tools(), *search.tools()])
        …
        files.close()

    It lives in a thread of its own, so its tools can be used from any event loop. A connection that breaks is made
    anew at the next call; a command is then started again. Nothing of a command outlives this process, however it ends.

    Args:
        server: a URL, or a command that speaks MCP on its standard input and output.
        env: environment of that command, beside a safe few of this process's.
        cwd: folder that the command is started in.
        headers: sent with every request to a URL.
        timeout: seconds for one call.
        start_seconds: seconds for connecting, which is starting the command too.
        stateful: whether calls of one turn must run in the order written.
        only: names of the tools to take; by default all.
        max_tokens, max_chars: longer answers are cut, visibly.
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
        """Sets the episodes of this process apart from everybody else's."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"arborl-mcp-{self}", daemon=True).start()
        self._connection: _Connection | None = None
        self._holders: set[asyncio.Task[None]] = set()
        """Of connections that are open, or not yet quite closed."""
        self._breaker = Breaker(failures=2)
        self._closed, self._deaths = False, 0

    def __str__(self) -> str:
        return self.server if isinstance(self.server, str) else " ".join(self.server)

    # ------------------------------------------------------------------------------------------------ use

    def tools(self) -> list[McpTool]:
        """Its tools. Blocks until it has answered: meant for the time before a run."""
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
        """That there is such a program: the system's own error would come from another process."""
        if isinstance(self.server, str):
            return
        if self.cwd is not None and not os.path.isdir(self.cwd):
            raise ConfigError(f"{str(self.cwd)!r}, where {self} is to be started, is no folder.")
        program = self.server[0]
        found = os.path.join(self.cwd or "", program) if os.path.dirname(program) else program
        if shutil.which(found, path=self.env.get("PATH")) is None:
            raise ConfigError(f"there is no program {program!r} to start. Is it installed, and on PATH?")

    async def call(self, name: str, arguments: Mapping[str, Any], session: str | None = None) -> ToolResult:
        """Answer one call; a server that fails or is gone is an answer too."""
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
            content, kind = f"{name}: the MCP server {self} is gone: {_reason(error)}", "unavailable"
        return ToolResult(content, kind == "ok", kind, time.perf_counter() - start)

    def close(self) -> None:
        """End the connection, and the command if it is one. A second time nothing happens."""
        if self._closed:
            return
        self._closed = True
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(15)
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ------------------------------------------------------------------------------------------------ in its thread

    async def _list(self) -> list[types.Tool]:
        client = (await self._connected()).client
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
        meta: Any = {SESSION: session} if session else None
        connection = await self._connected()
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

    async def _connected(self) -> _Connection:
        """The connection; one is begun now if there is none. Who gives up waiting leaves it to the others."""
        try:
            async with asyncio.timeout(self.start_seconds):
                if self._connection is None:
                    await self._breaker.enter()
                    if self._connection is None:
                        self._connection = _Connection(self._transport, self.start_seconds)
                        self._connection.opened.add_done_callback(self._known)
                        self._holders.add(self._connection.holder)
                        self._connection.holder.add_done_callback(self._holders.discard)
                    else:
                        self._breaker.left()
                connection = self._connection
                await asyncio.shield(connection.opened)
                return connection
        except TimeoutError as error:
            raise ConnectionError(f"no answer in {self.start_seconds:g} s") from error

    def _known(self, opened: asyncio.Future[None]) -> None:
        """Whether the connection is one."""
        if opened.cancelled() or opened.exception() is not None:
            self._connection = None
            self._breaker.failed()
        else:
            self._breaker.worked()

    def _transport(self, errors: TextIO) -> Any:
        if not isinstance(self.server, str):
            guarded = ["-I", "-S", str(Path(__file__).with_name("guard.py")), *self.server]
            return stdio_client(
                StdioServerParameters(command=sys.executable, args=guarded, env=self.env, cwd=self.cwd), errors
            )
        if not self.headers:
            return self.server
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        return streamable_http_client(self.server, http_client=create_mcp_http_client(headers=self.headers))

    async def _drop(self, connection: _Connection) -> None:
        """A connection is broken. One that was made since then stays."""
        if self._connection is not connection:
            return
        self._connection = None
        await connection.close()
        self._deaths += 1
        if self._deaths in (1, 10, 100, 1000):
            again = f", for the {self._deaths}th time" if self._deaths > 1 else ""
            words = f" It said: {connection.said}" if connection.said else ""
            log.warning("the MCP server %s has ended%s; it is started again when it is called.%s", self, again, words)

    async def _end(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._holders:
            await asyncio.wait(self._holders, timeout=12)


class _Connection:
    """Opens and closes in one task, as the SDK's scopes want it."""

    def __init__(self, transport: Callable[[TextIO], Any], seconds: float):
        self.client: Client
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._scope: anyio.CancelScope | None = None
        self.said = ""
        """The last line that a command which failed wrote to its standard error."""
        self.holder = asyncio.create_task(self._hold(transport, seconds))

    async def _hold(self, transport: Callable[[TextIO], Any], seconds: float) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            why: BaseException | None = None
            try:
                with anyio.fail_after(seconds) as self._scope:
                    async with Client(transport(errors)) as self.client:
                        self._scope.deadline = math.inf
                        self.opened.set_result(None)
                        await self._stop.wait()
            except BaseException as error:
                why = error
            errors.seek(0)
            self.said = next((line.strip() for line in reversed(errors.readlines()) if line.strip()), "")[:300]
        if not self.opened.done():
            what = f"no answer in {seconds:g} s" if isinstance(why, TimeoutError) else _reason(why or EOFError())
            self.opened.set_exception(ConnectionError(f"{what}. It said: {self.said}" if self.said else what))

    async def close(self) -> None:
        self._stop.set()
        if not self.opened.done() and self._scope is not None:
            self._scope.cancel()  # not the task: only a scope spares the SDK's own cleaning up
        await asyncio.wait([self.holder], timeout=12)


class McpTool:
    """One tool of an MCP server, to be used as one's own."""

    def __init__(self, server: McpServer, about: types.Tool):
        self.server, self.name = server, about.name
        self.spec = ToolSpec(about.name, about.description or "", dict(about.input_schema))
        self.stateful, self.terminal = server.stateful, False

    def __repr__(self) -> str:
        return f"McpTool({self.name!r}, {str(self.server)!r})"

    async def run(self, arguments: Mapping[str, Any], context: Context | None = None) -> ToolResult:
        """Answer one call."""
        result = await self.server.call(self.name, arguments, f"{self.server.name}-{context.id}" if context else None)
        kept = cut(
            result.content, self.server.max_chars, self.server.max_tokens, context.tokenizer if context else None
        )
        return ToolResult(kept, result.ok, result.kind, result.seconds)


def _text(result: types.CallToolResult) -> str:
    """What the model reads: the text parts, and a word for each that is none."""
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    return "\n".join(parts) or (str(result.structured_content) if result.structured_content else "")


def _reason(error: BaseException) -> str:
    """The innermost reason of a group of errors."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or type(error).__name__


# ------------------------------------------------------------------------------------------------ ours as a server


def make_server(desk: Desk) -> Server[Any]:
    """The tools of a desk as an MCP server. The state of stateful tools lasts as long as the connection."""
    fallback = f"mcp-{uuid.uuid4().hex[:12]}"

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        offered = [
            types.Tool(name=each.name, description=each.description, input_schema=each.parameters)
            for each in desk.about()
        ]
        return types.ListToolsResult(tools=offered)

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        headers = getattr(context.request, "headers", {}) or {}
        meta = context.meta or {}
        session = meta.get(SESSION) or headers.get("mcp-session-id") or (None if context.request else fallback)
        try:
            request = CallRequest(name=params.name, arguments=params.arguments or {}, session=session)
            answer = await desk.answer(request)
        except (ArborError, ValueError) as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)
        text = types.TextContent(type="text", text=answer.content)
        return types.CallToolResult(content=[text], is_error=not answer.ok)

    return Server("arborl", on_list_tools=list_tools, on_call_tool=call_tool)


def serve_stdio(tools: Sequence[AnyTool]) -> None:
    """Speak MCP on standard input and output until it ends."""
    from mcp.server.stdio import stdio_server

    async def run() -> None:
        desk = Desk(tools)
        server = make_server(desk)
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())
        await desk.drain(5)

    asyncio.run(run())


def mounted(desk: Desk) -> Callable[[Any], AsyncIterator[None]]:
    """What adds MCP over HTTP to an application, at `/mcp`, for as long as it lives."""
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
    from starlette.routing import Route

    async def live(app: Any) -> AsyncIterator[None]:
        manager = StreamableHTTPSessionManager(make_server(desk))
        app.router.routes.append(Route("/mcp", endpoint=StreamableHTTPASGIApp(manager)))
        async with manager.run():
            yield

    return live
