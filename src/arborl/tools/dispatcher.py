"""The tool server without HTTP: admits calls, runs each once, keeps the state of sessions."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from arborl.errors import ArborError, EpisodeError
from arborl.sandbox import Limits, Outcome, Pool, shared_pool
from arborl.tools.injection import Context, Given
from arborl.tools.journal import Journal
from arborl.tools.protocol import About, CallAnswer, CallRequest
from arborl.tools.tool import AnyTool
from arborl.tools.toolbox import Toolbox
from arborl.types import Task, ToolCall, ToolResult

UNKNOWN = ""
"""Stands for every name that is no tool's."""


class Busy(ArborError):
    """As many calls are waiting as may; ask again later."""


class Reused(ArborError):
    """A key came again with another call: answering with the first one's result would be a lie."""


class Draining(ArborError):
    """The server is about to stop and takes no more calls."""


class Lane:
    """The calls of one tool: so many run, so many wait, one more is refused. A slow tool holds up only itself."""

    def __init__(self, concurrency: int, queue: int):
        self.most = concurrency + queue
        self.held = self.running = 0
        self._slots = asyncio.Semaphore(concurrency)

    @property
    def waiting(self) -> int:
        return self.held - self.running

    def enter(self) -> None:
        if self.held >= self.most:
            raise Busy(f"{self.waiting} calls are waiting")
        self.held += 1

    def leave(self, _: object = None) -> None:
        self.held -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One of the calls that run; the others wait in the order they came."""
        async with self._slots:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


@dataclass(slots=True)
class ToolSession:
    """The state of one episode of some client."""

    context: Context
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls to stateful tools run one after another."""
    used: float = 0.0


class Desk:
    """Answers calls.

    Args:
        tools: what may be called.
        concurrency: calls of one tool that run at a time.
        queue: calls of one tool that may wait beyond these; one more is refused with `Busy`.
        journal: remembers stateful calls; by default in memory.
        session_seconds: a session unused for this long is ended.
        watch: told about every call that was run: the tool's name and its result.
        pool: sandboxes for `execute`.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]],
        concurrency: int = 64,
        queue: int = 4096,
        journal: Journal | None = None,
        session_seconds: float = 3600.0,
        watch: Callable[[str, ToolResult], None] = lambda name, result: None,
        pool: Pool | None = None,
    ):
        self.toolbox = Toolbox(tools)
        self.journal = journal or Journal(None)
        self.session_seconds, self.watch = session_seconds, watch
        self.replayed = 0
        self.draining = False
        self._pool = pool
        self._lanes = {name: Lane(concurrency, queue) for name in (*self.toolbox.tools, UNKNOWN)}
        self._flying: dict[str, tuple[str, asyncio.Task[CallAnswer]]] = {}
        self._recent: OrderedDict[str, tuple[str, CallAnswer]] = OrderedDict()
        self._sessions: dict[str, ToolSession] = {}
        self._tasks: set[asyncio.Task[CallAnswer]] = set()

    def about(self) -> list[About]:
        """What is on offer."""
        return [about(made) for made in self.toolbox.tools.values()]

    @property
    def running(self) -> int:
        return sum(lane.running for lane in self._lanes.values())

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self._lanes.values())

    # ------------------------------------------------------------------------------------------------ calls

    async def answer(self, request: CallRequest) -> CallAnswer:
        """Answer one call; a call that has been answered is answered again from memory."""
        if request.key is not None and (before := self._before(request.key)) is not None:
            digest, given = before
            if digest != request.digest:
                raise Reused(f"the key {request.key!r} was another call's; give every call a key of its own")
            self.replayed += 1
            answer = given if isinstance(given, CallAnswer) else await asyncio.shield(given)
            return answer.model_copy(update={"replayed": True})
        lane = self._admit(request.name)
        # A task of its own: a client that hangs up does not stop a call that has begun.
        task = asyncio.create_task(self._run(request, lane))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lane.leave)
        if request.key is not None:
            self._flying[request.key] = request.digest, task
        return await asyncio.shield(task)

    async def execute(self, code: str) -> Outcome:
        """Code in a sandbox of its own, under the same limits as calls of `python`."""
        lane = self._admit("python")
        try:
            async with lane.slot():
                limits = getattr(self.toolbox.tools.get("python"), "limits", Limits())
                pool = self._pool or shared_pool(limits)
                outcome = await pool.run(code)
        finally:
            lane.leave()
        kind = "ok" if outcome.ok else "exception"
        self.watch("execute", ToolResult(outcome.output, outcome.ok, kind, outcome.seconds))
        return outcome

    def _admit(self, name: str) -> Lane:
        if self.draining:
            raise Draining("the server is about to stop")
        lane = self._lanes.get(name) or self._lanes[UNKNOWN]
        lane.enter()
        return lane

    def _before(self, key: str) -> tuple[str, CallAnswer | asyncio.Task[CallAnswer]] | None:
        """The call that had this key before, and its answer: here, or in an earlier life of the server."""
        known = self._flying.get(key) or self._recent.get(key)
        if known is not None or (written := self.journal.find(key)) is None:
            return known
        digest, text = written
        if text is not None:
            return digest, CallAnswer.model_validate_json(text)
        return digest, lost("the tool server was stopped while this call ran; it may or may not have had its effect")

    def _stateful(self, request: CallRequest) -> bool:
        made = self.toolbox.tools.get(request.name)
        return made is not None and made.stateful

    async def _run(self, request: CallRequest, lane: Lane) -> CallAnswer:
        try:
            if self._stateful(request):
                given = await self._run_stateful(request, lane)
            else:
                async with lane.slot():
                    context = Context(Task(request.session or "", fields=request.fields))
                    given = await self._call(request, context)
                    await context.close()
            if request.key is not None:
                self._recent[request.key] = request.digest, given
                while len(self._recent) > 10_000:
                    self._recent.popitem(last=False)
            return given
        finally:
            self._flying.pop(request.key or "", None)

    async def _run_stateful(self, request: CallRequest, lane: Lane) -> CallAnswer:
        """Under the journal and, where it has a session, in turn: who waits for it keeps nobody else from running."""
        async with self._session(request) as context:
            if context is None:
                return lost("the tool server was started anew: what earlier calls of this episode had set up is gone")
            async with lane.slot():
                if request.key is not None:
                    self.journal.begin(request.key, request.digest)
                given = await self._call(request, context)
                if request.key is not None:
                    self.journal.end(request.key, given.model_dump_json())
                return given

    async def _call(self, request: CallRequest, context: Context) -> CallAnswer:
        call = ToolCall(request.key or "", request.name, request.arguments)
        try:
            (result,) = await self.toolbox.run([call], context)
        except EpisodeError as error:
            result = ToolResult(str(error), False, "exception")
        self.watch(request.name if request.name in self.toolbox.tools else "unknown", result)
        return CallAnswer.of(result)

    # ------------------------------------------------------------------------------------------------ sessions

    @asynccontextmanager
    async def _session(self, request: CallRequest) -> AsyncIterator[Context | None]:
        """The state a call finds: its session's, its own where it has none, None where it was lost."""
        if request.session is None:
            async with Context(Task("", fields=request.fields)) as once:
                yield once
            return
        await self._sweep()
        session = self._sessions.get(request.session)
        if session is None:
            if not self.journal.open_session(request.session):
                yield None
                return
            session = ToolSession(Context(Task(request.session, fields=request.fields)))
            self._sessions[request.session] = session
        session.used = time.monotonic()
        async with session.turn:
            yield session.context

    async def end_session(self, name: str) -> None:
        """Close what the calls of a session set up. Ending one that is not there is no mistake."""
        session = self._sessions.pop(name, None)
        self.journal.close_session(name)
        if session is not None:
            async with session.turn:
                try:
                    await session.context.close()
                except EpisodeError as error:
                    self.watch("close", ToolResult(str(error), False, "exception"))

    async def _sweep(self) -> None:
        """End sessions that nobody has used for long: a client that died does not end its own."""
        old = time.monotonic() - self.session_seconds
        for name in [name for name, session in self._sessions.items() if session.used < old]:
            await self.end_session(name)

    async def drain(self, seconds: float) -> None:
        """Take no more calls, let those that run end, close every session."""
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for name in list(self._sessions):
            await self.end_session(name)
        self.journal.close()


def about(made: AnyTool) -> About:
    """A tool in the words of the wire."""
    filler = getattr(made, "_filler", None)
    marks = filler.marks.items() if filler is not None else ()
    wants = [mark.field or parameter for parameter, mark in marks if isinstance(mark, Given)]
    spec = made.spec
    return About(
        name=spec.name, description=spec.description, parameters=spec.parameters, stateful=made.stateful,
        terminal=made.terminal, fields=wants,
    )  # fmt: skip


def lost(why: str) -> CallAnswer:
    """The answer to a call of which nobody knows any more."""
    return CallAnswer(content=why, ok=False, kind="lost", seconds=0.0)
