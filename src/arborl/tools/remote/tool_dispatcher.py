"""The tool server without HTTP: queues, sessions, and a journal of stateful calls."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arborl.errors import ArborError, ConfigError, EpisodeError
from arborl.sandbox import SandboxLimits, SandboxPool, SandboxResult, shared_pool
from arborl.tools.core.tool import AnyTool
from arborl.tools.core.tool_context import TaskField, ToolContext
from arborl.tools.core.toolbox import Toolbox
from arborl.tools.remote.tool_protocol import CallRequest, CallResponse, ToolDescription
from arborl.types import Task, ToolCall, ToolResult

log = logging.getLogger(__name__)

UNKNOWN = ""
MAX_STORED_RESPONSES = 10_000


class TooManyCalls(ArborError):
    """The queue of the tool is full."""


class KeyReused(ArborError):
    """The idempotency key belongs to another call."""


class ServerDraining(ArborError):
    """The server is stopping and accepts no calls."""


class ToolQueue:
    """Calls of one tool: a bounded number run, a bounded number wait, further calls are refused."""

    def __init__(self, concurrency: int, queue: int):
        self.capacity = concurrency + queue
        self.calls = self.running = 0
        self._semaphore = asyncio.Semaphore(concurrency)

    @property
    def waiting(self) -> int:
        return self.calls - self.running

    def enter(self) -> None:
        if self.calls >= self.capacity:
            raise TooManyCalls(f"{self.waiting} calls are waiting; retry later")
        self.calls += 1

    def leave(self, _: object = None) -> None:
        self.calls -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        async with self._semaphore:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


@dataclass(slots=True)
class ToolSession:
    """State of one episode of a client."""

    context: ToolContext
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # calls of stateful tools run one after another
    last_used: float = 0.0


class ToolDispatcher:
    """Runs calls."""

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]],
        concurrency: int = 64,
        queue: int = 4096,
        journal: CallJournal | None = None,
        session_seconds: float = 3600.0,
        on_result: Callable[[str, ToolResult], None] = lambda name, result: None,
        pool: SandboxPool | None = None,
    ):
        self.toolbox = Toolbox(tools)
        self.journal = journal or CallJournal(None)
        self.session_seconds, self.on_result = session_seconds, on_result
        self.replayed = 0
        self.draining = False
        self._pool = pool
        self._queues = {name: ToolQueue(concurrency, queue) for name in (*self.toolbox.tools, UNKNOWN)}
        self._running_calls: dict[str, tuple[str, asyncio.Task[CallResponse]]] = {}
        self._stored: OrderedDict[str, tuple[str, CallResponse]] = OrderedDict()
        self._sessions: dict[str, ToolSession] = {}
        self._tasks: set[asyncio.Task[CallResponse]] = set()

    def descriptions(self) -> list[ToolDescription]:
        return [describe_tool(tool) for tool in self.toolbox.tools.values()]

    @property
    def running(self) -> int:
        return sum(queue.running for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        return sum(queue.waiting for queue in self._queues.values())

    async def call(self, request: CallRequest) -> CallResponse:
        """Run one call. A repeated request gets the stored response."""
        if request.key is not None and (stored := self._find(request.key)) is not None:
            digest, response = stored
            if digest != request.digest:
                raise KeyReused(f"the key {request.key!r} belongs to another call; give every call a new key")
            self.replayed += 1
            response = response if isinstance(response, CallResponse) else await asyncio.shield(response)
            return response.model_copy(update={"replayed": True})
        queue = self._admit(request.name)
        # A separate task: a client that disconnects does not stop a running call.
        task = asyncio.create_task(self._run(request, queue))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(queue.leave)
        if request.key is not None:
            self._running_calls[request.key] = request.digest, task
        return await asyncio.shield(task)

    async def execute(self, code: str) -> SandboxResult:
        queue = self._admit("python")
        try:
            async with queue.slot():
                limits = getattr(self.toolbox.tools.get("python"), "limits", SandboxLimits())
                pool = self._pool or shared_pool(limits)
                result = await pool.run(code)
        finally:
            queue.leave()
        kind = "ok" if result.ok else "exception"
        self.on_result("execute", ToolResult(result.output, result.ok, kind, result.seconds))
        return result

    def _admit(self, name: str) -> ToolQueue:
        if self.draining:
            raise ServerDraining("the server is stopping")
        queue = self._queues.get(name) or self._queues[UNKNOWN]
        queue.enter()
        return queue

    def _find(self, key: str) -> tuple[str, CallResponse | asyncio.Task[CallResponse]] | None:
        """Digest and response of the call with this key, also from before a restart of the server."""
        known = self._running_calls.get(key) or self._stored.get(key)
        if known is not None or (written := self.journal.find(key)) is None:
            return known
        digest, text = written
        if text is not None:
            return digest, CallResponse.model_validate_json(text)
        return digest, lost_call("the tool server was stopped while this call ran; its effect is unknown")

    async def _run(self, request: CallRequest, queue: ToolQueue) -> CallResponse:
        try:
            if getattr(self.toolbox.tools.get(request.name), "stateful", False):
                response = await self._run_stateful(request, queue)
            else:
                async with queue.slot():
                    context = ToolContext(Task(request.session or "", fields=request.fields))
                    response = await self._call(request, context)
                    await context.close()
            if request.key is not None:
                self._stored[request.key] = request.digest, response
                while len(self._stored) > MAX_STORED_RESPONSES:
                    self._stored.popitem(last=False)
            return response
        finally:
            self._running_calls.pop(request.key or "", None)

    async def _run_stateful(self, request: CallRequest, queue: ToolQueue) -> CallResponse:
        """Run a stateful call with journal and session. A call that waits for its session occupies no slot."""
        async with self._session(request) as context:
            if context is None:
                return lost_call("the tool server was restarted: the state of this episode's earlier calls is lost")
            async with queue.slot():
                if request.key is not None:
                    self.journal.begin(request.key, request.digest)
                response = await self._call(request, context)
                if request.key is not None:
                    self.journal.end(request.key, response.model_dump_json())
                return response

    async def _call(self, request: CallRequest, context: ToolContext) -> CallResponse:
        call = ToolCall(request.key or "", request.name, request.arguments)
        try:
            (result,) = await self.toolbox.run([call], context)
        except EpisodeError as error:
            result = ToolResult(str(error), False, "exception")
        self.on_result(request.name if request.name in self.toolbox.tools else "unknown", result)
        return CallResponse.of(result)

    @asynccontextmanager
    async def _session(self, request: CallRequest) -> AsyncIterator[ToolContext | None]:
        """Context of the call's session; a temporary one without a session; None if the session was lost."""
        if request.session is None:
            async with ToolContext(Task("", fields=request.fields)) as temporary:
                yield temporary
            return
        await self._close_old_sessions()
        session = self._sessions.get(request.session)
        if session is None:
            if not self.journal.open_session(request.session):
                yield None
                return
            session = ToolSession(ToolContext(Task(request.session, fields=request.fields)))
            self._sessions[request.session] = session
        session.last_used = time.monotonic()
        async with session.lock:
            yield session.context

    async def end_session(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        self.journal.close_session(name)
        if session is not None:
            async with session.lock:
                try:
                    await session.context.close()
                except EpisodeError as error:
                    self.on_result("close", ToolResult(str(error), False, "exception"))

    async def _close_old_sessions(self) -> None:
        old = time.monotonic() - self.session_seconds
        for name in [name for name, session in self._sessions.items() if session.last_used < old]:
            await self.end_session(name)

    async def drain(self, seconds: float) -> None:
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for name in list(self._sessions):
            await self.end_session(name)
        self.journal.close()


def describe_tool(tool: AnyTool) -> ToolDescription:
    injector = getattr(tool, "injector", None)
    markers = injector.markers.items() if injector is not None else ()
    fields = [marker.field or parameter for parameter, marker in markers if isinstance(marker, TaskField)]
    spec = tool.spec
    return ToolDescription(
        name=spec.name, description=spec.description, parameters=spec.parameters, stateful=tool.stateful,
        terminal=tool.terminal, fields=fields,
    )  # fmt: skip


def lost_call(reason: str) -> CallResponse:
    return CallResponse(content=reason, ok=False, kind="lost", seconds=0.0)


KEEP_SECONDS = 24 * 3600.0
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""Errors of a damaged file: also undecodable messages and impossible lengths."""
JOURNAL_VERSION = 2


class JournalUnavailable(ArborError):
    """The journal cannot be written (disk full, damaged file); the call is not run."""


TABLES = """
CREATE TABLE IF NOT EXISTS calls
    (key TEXT PRIMARY KEY, digest TEXT NOT NULL, answer TEXT, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (name TEXT PRIMARY KEY, life TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
"""


class CallJournal:
    """Stateful calls on disk, written before and after each call. It survives the process, not a power failure."""

    def __init__(self, path: Path | None):
        self.server_id = uuid.uuid4().hex
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        except (*SQLITE_ERRORS, OSError) as error:
            raise ConfigError(_open_error(path, error)) from error
        try:
            self._initialize()
        except SQLITE_ERRORS as error:
            self.close()  # releases the lock of the file
            raise ConfigError(_open_error(path, error)) from error

    def _initialize(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")  # written data survives this process
        if connection.execute("PRAGMA user_version").fetchone()[0] != JOURNAL_VERSION:
            connection.executescript("DROP TABLE IF EXISTS calls; DROP TABLE IF EXISTS sessions")
            connection.execute(f"PRAGMA user_version = {JOURNAL_VERSION}")
        connection.executescript(TABLES)
        for table in ("calls", "sessions"):
            connection.execute(f"DELETE FROM {table} WHERE at < ?", (time.time() - KEEP_SECONDS,))

    def begin(self, key: str, digest: str) -> bool:
        """Record that the call starts; False if it was started before."""
        added = self._execute("INSERT OR IGNORE INTO calls VALUES (?, ?, NULL, ?)", key, digest, time.time())
        return added.rowcount == 1

    def end(self, key: str, answer: str) -> None:
        """Record the response. On failure the call stays recorded as started."""
        try:
            self._execute("UPDATE calls SET answer = ? WHERE key = ?", answer, key)
        except JournalUnavailable as error:
            log.warning("%s", error)

    def find(self, key: str) -> tuple[str, str | None] | None:
        """Digest and response of the call with this key; the response is None if it did not end."""
        return self._execute("SELECT digest, answer FROM calls WHERE key = ?", key).fetchone()

    def open_session(self, name: str) -> bool:
        """Record that the session has state; False if its state was lost with an earlier server process."""
        self._execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?)", name, self.server_id, time.time())
        row = self._execute("SELECT life FROM sessions WHERE name = ?", name).fetchone()
        return bool(row and row[0] == self.server_id)

    def close_session(self, name: str) -> None:
        self._execute("DELETE FROM sessions WHERE name = ?", name)

    def close(self) -> None:
        self._connection.close()

    def _execute(self, statement: str, *row: object) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement, row)
        except SQLITE_ERRORS as error:
            raise JournalUnavailable(f"the journal of stateful calls cannot be used: {_error_text(error)}") from error


def _open_error(path: Path | None, error: Exception) -> str:
    return f"{path}: not a usable journal ({_error_text(error)}). Remove it, or give another path."


def _error_text(error: Exception) -> str:
    return str(error) or "out of memory"
