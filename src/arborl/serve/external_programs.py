"""External programs that play episodes: a process per task, a Python function, or an HTTP service.

`play` returns the answer of the program, or None if it gives none. A program that fails raises an exception.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from arborl.agents.agent_interface import is_async
from arborl.child_process import CommandFailed, run_command
from arborl.errors import paused_deadlines
from arborl.registry import load
from arborl.serve.episode_server import ExternalEpisode
from arborl.serve.warm_start import can_fork
from arborl.tools.core.background_threads import run_in_thread
from arborl.tools.remote.http_connections import HttpConnections

MAX_TASK_BYTES = 100_000
"""Size of the variable ARBORL_TASK; Linux accepts 128 KiB."""
API_KEY = "arborl"
"""Clients need some key; the URL identifies the episode."""
SCRIPTS = (".py", ".sh", ".bash", ".js", ".mjs", ".ts", ".rb", ".pl")
"""Endings of a file that an interpreter, the first word of a command, is given."""
NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
FUNCTION_ARGUMENTS = ("question", "messages", "fields", "task", "base_url", "api_key")


class ProgramError(RuntimeError):
    """An external program failed."""


class ExternalProgram(Protocol):
    name: str

    async def play(self, episode: ExternalEpisode, url: str) -> str | None: ...


class CommandProgram:
    """A process per task. It reads the question from standard input and the URL from its environment, and prints its
    answer. The process and its children are ended with the episode.

    Args:
        words: the program and its arguments.
        max_processes: processes at once.
        warm: fork the processes of a Python program from one that has imported its packages; None: on Linux.
    """

    def __init__(self, words: Sequence[str], max_processes: int, warm: bool | None = None):
        if isinstance(words, str) or not words or not all(isinstance(word, str) for word in words):
            raise ValueError(f"command: write a list of words such as [python, script.py], not {words!r}")
        if shutil.which(words[0], path=_path()) is None:
            raise ValueError(f"command: program {words[0]!r} not found")
        if len(words) > 1 and Path(words[1]).suffix in SCRIPTS and not Path(words[1]).is_file():
            raise ValueError(f"command: there is no file {words[1]!r} in {Path.cwd()}. Write the path of the program")
        self.words = list(words)
        self.name = shlex.join(Path(word).name if word.startswith("/") else word for word in words)
        self.max_processes, self.is_warm = max_processes, can_fork() if warm is None else warm

    async def play(self, episode: ExternalEpisode, url: str) -> str | None:
        assert episode.server is not None
        slots = episode.server.process_slots(self.max_processes)
        with paused_deadlines():
            await slots.acquire()
        try:
            return await self._run(episode, url)
        finally:
            slots.release()

    async def _run(self, episode: ExternalEpisode, url: str) -> str | None:
        assert episode.server is not None
        question = episode.question.encode("utf-8", "replace")
        common, variables = self._environment(url), self._variables(episode, url)
        try:
            if self.is_warm:
                output = await episode.server.warm_start.run(self.words, question, common, variables)
            else:
                output = await run_command(self.words, question, {**common, **variables})
        except CommandFailed as error:
            *details, reason = str(error).split("\n")
            raise ProgramError("\n".join([reason, *details])) from None
        return output.decode(errors="replace").strip() or None

    def _environment(self, url: str) -> dict[str, str]:
        """Environment variables that are equal in all episodes."""
        hosts = [os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "", urlsplit(url).hostname or ""]
        no_proxy = ",".join(filter(None, hosts))
        variables = {"OPENAI_API_KEY": API_KEY, "PATH": _path(), "NO_PROXY": no_proxy, "no_proxy": no_proxy}
        return {**os.environ, **variables}

    def _variables(self, episode: ExternalEpisode, url: str) -> dict[str, str]:
        """Environment variables of an episode."""
        task = json.dumps(episode.task_object())
        return {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "ARBORL_EPISODE_URL": url,
            "ARBORL_TASK": task if len(task) <= MAX_TASK_BYTES else json.dumps({"id": episode.task.id, "url": url}),
        }  # fmt: skip


class FunctionProgram:
    """A Python function, which runs in a thread and returns its answer. Async functions share one thread. Its
    parameters are some of `FUNCTION_ARGUMENTS`."""

    def __init__(self, path: str):
        self.name, self.function = path, load(path, "program")
        if not callable(self.function):
            raise ValueError(f"call: {path!r} is a {type(self.function).__name__}, not a function")
        parameters = inspect.signature(self.function).parameters.values()
        required = [one for one in parameters if one.default is one.empty and one.kind in NAMED_KINDS]
        if unknown := [one.name for one in required if one.name not in FUNCTION_ARGUMENTS]:
            known = ", ".join(FUNCTION_ARGUMENTS)
            raise ValueError(f"call: {path!r} has the parameter {unknown[0]!r}; available: {known}")
        self.parameters = [one.name for one in parameters if one.name in FUNCTION_ARGUMENTS]

    async def play(self, episode: ExternalEpisode, url: str) -> str | None:
        task = episode.task_object()
        available = {**task, "task": task, "base_url": f"{url}/v1", "api_key": API_KEY}
        call = partial(self.function, **{name: available[name] for name in self.parameters})
        if is_async(self.function):
            loop = program_loop(os.getpid())
            answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_await_call(call), loop))
        else:
            answer = await run_in_thread(call, f"program {self.name!r}", episode.model.limits.episode_seconds)
        return None if answer is None else str(answer)


class HttpProgram:
    """A running service, which receives each task as a POST. It replies with `{"answer": …}` at the end; or with status
    202 at once, and posts its reward at the end."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"url: {url!r} is not a valid address. Write http://HOST:PORT/PATH")
        self.url, self.name = url, url.replace(f"{parts.username}:{parts.password}@", "")

    async def play(self, episode: ExternalEpisode, url: str) -> str | None:
        body = {"task": episode.task_object(), "base_url": f"{url}/v1", "api_key": API_KEY, "episode_url": url}
        data = json.dumps(body).encode()
        response = await HttpConnections(self.url, {"Connection": "close"}).request("POST", "", data)
        if response.status == 202:
            await episode.rewarded.wait()
            return None
        if response.status not in (200, 204):
            text = response.body[:2000].decode(errors="replace")
            raise ProgramError(f"it responded with status {response.status}: {text}")
        try:
            answer = json.loads(response.body or b"{}").get("answer")
        except (ValueError, AttributeError) as error:
            raise ProgramError(f'its response is not {{"answer": "…"}}: {response.body[:200]!r}') from error
        return None if answer is None else str(answer)


@cache
def program_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """The event loop of async programs, in its own thread, so that a blocking program does not block the run. It is
    never closed, because libraries keep connections that belong to it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="arborl-programs", daemon=True).start()
    return loop


async def _await_call(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except SystemExit as error:  # would end the event loop of all programs
        raise ProgramError(f"SystemExit: {error}") from error


def _path() -> str:
    """PATH with this interpreter first, so that `python` is the same one."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
