"""How a program of others is set to work on one task: started as a process, called as a function, or asked over HTTP.

Each returns what the program says is its answer, or None where it says nothing; a program that fails raises.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from arborl.agents.agent import is_async
from arborl.errors import paused_deadlines
from arborl.registry import load
from arborl.serve.episodes import Visit
from arborl.tools import guard
from arborl.tools.http import Connections
from arborl.tools.threads import in_thread

MOST_SAID = 2**20
"""Bytes that a program may print."""
MOST_TASK = 100_000
"""Bytes of a variable of the environment; Linux takes 128 KiB."""
HELD = 1.0
"""Seconds that a program's output is read after the program and its process tree have ended: a process outside that
tree may hold the pipe open."""
GRACE = 15.0
"""Seconds that the guard has to end a program's process tree before it is killed itself."""
KEY = "arborl"
"""Clients want some key; the address says who asks."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
OFFERED = ("question", "messages", "fields", "task", "base_url", "api_key")


class ProgramFailed(RuntimeError):
    """A program did not come to its end as it should."""


class Program(Protocol):
    name: str

    async def play(self, visit: Visit, at: str) -> str | None:
        """Set it to work on an episode that it finds at this address; its answer."""
        ...


class Command:
    """A process for each task. It gets the question on standard input, and in its environment where to call; what it
    prints is its answer. It and all it starts are gone when the episode is over.

    Args:
        words: the program and its arguments.
        most: processes at once; further ones wait, and their episodes' clocks stand still meanwhile.
    """

    def __init__(self, words: Sequence[str], most: int):
        if isinstance(words, str) or not words or not all(isinstance(word, str) for word in words):
            raise ValueError(f"command: give a list of words such as [python, script.py], not {words!r}")
        if shutil.which(words[0], path=_path()) is None:
            raise ValueError(f"command: there is no program {words[0]!r} to be started here")
        self.words = list(words)
        self.name = shlex.join(Path(word).name if word.startswith("/") else word for word in words)
        self.most = most

    async def play(self, visit: Visit, at: str) -> str | None:
        assert visit.endpoint is not None
        slots = visit.endpoint.slots(self.most)
        with paused_deadlines():
            await slots.acquire()
        try:
            return await self._run(visit.question, self._environment(visit, at))
        finally:
            slots.release()

    async def _run(self, question: str, environment: Mapping[str, str]) -> str | None:
        guarded = [sys.executable, "-I", "-S", str(Path(guard.__file__)), *self.words]
        pipe = asyncio.subprocess.PIPE
        async with output_pipe() as (printed, writing):
            child = await asyncio.create_subprocess_exec(
                *guarded, stdin=pipe, stdout=writing, stderr=pipe, env=environment, start_new_session=True
            )
            os.close(writing)
            said = bytearray()
            reading = asyncio.create_task(_read(printed, said, child))
            try:
                assert child.stdin is not None
                assert child.stderr is not None
                child.stdin.write(question.encode("utf-8", "replace"))
                child.stdin.close()
                words = await child.stderr.read()  # only the guard holds this pipe: it closes when the guard ends
                await asyncio.wait([reading], timeout=HELD)
            finally:
                reading.cancel()
                await _end(child)
        if len(said) > MOST_SAID:
            raise ProgramFailed(f"it printed more than {MOST_SAID:,} bytes; what it prints is its answer")
        if words:  # the guard's, which speaks where there was an error
            *before, last = words.decode(errors="replace").strip().split("\n")
            raise ProgramFailed("\n".join([last, *before]))
        return said.decode(errors="replace").strip() or None

    def _environment(self, visit: Visit, at: str) -> dict[str, str]:
        task = json.dumps(visit.told())
        own = {
            "OPENAI_BASE_URL": f"{at}/v1", "OPENAI_API_BASE": f"{at}/v1", "OPENAI_API_KEY": KEY,
            "ARBORL_EPISODE_URL": at, "PATH": _path(),
            "ARBORL_TASK": task if len(task) <= MOST_TASK else json.dumps({"id": visit.task.id, "url": at}),
        }  # fmt: skip
        near = [os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "", urlsplit(at).hostname or ""]
        return {**os.environ, **own, **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, near)))}


class Function:
    """A function of this process, in a thread: async ones share one, a plain one has its own. What it returns is its
    answer. It takes what it asks for by name, of `OFFERED`.

    Args:
        path: `package.module:function`.
    """

    def __init__(self, path: str):
        self.name, self.function = path, load(path, "program")
        if not callable(self.function):
            raise ValueError(f"call: {path!r} is a {type(self.function).__name__}, and no function")
        parameters = inspect.signature(self.function).parameters.values()
        asks = [one for one in parameters if one.default is one.empty and one.kind in BY_NAME]
        if unknown := [one.name for one in asks if one.name not in OFFERED]:
            raise ValueError(f"call: {path!r} asks for {unknown[0]!r}; by name there are: {', '.join(OFFERED)}")
        self.takes = [one.name for one in parameters if one.name in OFFERED]

    async def play(self, visit: Visit, at: str) -> str | None:
        task = visit.told()
        offered = {**task, "task": task, "base_url": f"{at}/v1", "api_key": KEY}
        asked = partial(self.function, **{name: offered[name] for name in self.takes})
        if is_async(self.function):
            said = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_called(asked), beside(os.getpid())))
        else:
            said = await in_thread(asked, f"program {self.name!r}", visit.model.limits.episode_seconds)
        return None if said is None else str(said)


class Address:
    """A program that is there already, and is told of each task by a POST. It answers with `{"answer": …}` when it is
    done; or with status 202 at once, and posts its reward when it is done.

    Args:
        url: where.
    """

    def __init__(self, url: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"url: {url!r} is no address of a program. Write http://HOST:PORT/PATH")
        self.url, self.name = url, url.replace(f"{parts.username}:{parts.password}@", "")

    async def play(self, visit: Visit, at: str) -> str | None:
        told = {"task": visit.told(), "base_url": f"{at}/v1", "api_key": KEY, "episode_url": at}
        said = await Connections(self.url, {"Connection": "close"}).request("POST", "", json.dumps(told).encode())
        if said.status == 202:
            await visit.rewarded.wait()
            return None
        if said.status not in (200, 204):
            raise ProgramFailed(f"answered with status {said.status}: {said.body[:2000].decode(errors='replace')}")
        try:
            answer = json.loads(said.body or b"{}").get("answer")
        except (ValueError, AttributeError) as error:
            raise ProgramFailed(f'its answer is not like {{"answer": "…"}}: {said.body[:200]!r}') from error
        return None if answer is None else str(answer)


@cache
def beside(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of async programs, in a thread of its own: one that blocks holds up its like, and not the run. It
    is never closed, since libraries keep connections that belong to it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="arborl-programs", daemon=True).start()
    return loop


async def _called(asked: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await asked()
    except SystemExit as error:  # would end the event loop, and all programs in it
        raise ProgramFailed(f"SystemExit: {error}") from error


def _path() -> str:
    """`python` is the interpreter of this run."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@asynccontextmanager
async def output_pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A pipe for what a program prints: a reader, and the descriptor to write to, which the caller closes. It is not
    one of asyncio's own pipes: asyncio reports the end of a process only when those are closed at the other end."""
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
    )
    try:
        yield reader, writing
    finally:
        transport.close()


async def _read(printed: asyncio.StreamReader, said: bytearray, child: asyncio.subprocess.Process) -> None:
    """Add what a program prints to `said`. One that prints too much is ended."""
    while piece := await printed.read(2**16):
        if len(said) > MOST_SAID:
            continue
        said += piece
        if len(said) > MOST_SAID:
            _signal(child, signal.SIGTERM)


async def _end(child: asyncio.subprocess.Process) -> None:
    """End the guard, and with it the program and all that it started. A second cancellation does not interrupt this."""
    _signal(child, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while child.returncode is None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.002)
        if time.monotonic() > until:
            _signal(child, signal.SIGKILL)


def _signal(child: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError):
        child.send_signal(number)
