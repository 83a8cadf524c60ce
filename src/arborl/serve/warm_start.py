"""Warm start of Python commands: a template process imports the packages of a command once and forks for each episode.

`WarmStart` belongs to an event loop. It has one template (`python_template.py`) per command, which is restarted if it
ends, if a file of the program changes, or if the environment or the working folder of the run changes. Commands that
are no Python programs, and those whose template does not start, are run as a new process each.

`multiprocessing.forkserver` is not used: it forks one server per process for pickled functions of the same interpreter,
redirects standard input to /dev/null, starts no session, and ends its processes without the end of an interpreter.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl import child_process
from arborl.child_process import MAX_OUTPUT, StartedCommand, communicate, output_pipe, run_command, supervised_command
from arborl.errors import paused_deadlines
from arborl.serve import python_template

log = logging.getLogger(__name__)

PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
FLAGS = re.compile(r"-[bBdEIOPqsSu]+")
START_SECONDS = 300.0
"""Time limit for the imports of a template."""
MAX_DEATHS = 3
"""Times that a template may end by itself before its command is run without one."""
CLOSE_SECONDS = 20.0


class TemplateError(Exception):
    """A template does not start, or has ended."""


@dataclass(frozen=True)
class PythonCommand:
    """The parts of `python [options] script.py [arguments]` or `python [options] -m module [arguments]`."""

    words: tuple[str, ...]
    options: tuple[str, ...]
    script: str | None
    module: str | None
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> PythonCommand | None:
        """None if the words are something else."""
        if not words or not PYTHON.fullmatch(Path(words[0]).name):
            return None
        at = 1
        while at < len(words):
            if words[at] in ("-W", "-X"):
                at += 2
            elif FLAGS.fullmatch(words[at]) or words[at].startswith(("-W", "-X")):
                at += 1
            else:
                break
        options, rest = tuple(words[1:at]), tuple(words[at:])
        if len(rest) > 1 and rest[0] == "-m":
            return cls(tuple(words), options, None, rest[1], rest[2:])
        if rest and rest[0].endswith(".py") and not rest[0].startswith("-") and Path(rest[0]).is_file():
            return cls(tuple(words), options, rest[0], None, rest[1:])
        return None


class WarmStart:
    """Runs commands, those of Python in forks of a template."""

    def __init__(self) -> None:
        self._templates: dict[PythonCommand, TemplateProcess] = {}
        self._starting: dict[PythonCommand, asyncio.Task[TemplateProcess]] = {}
        self._replaced: set[TemplateProcess] = set()
        self._deaths: dict[PythonCommand, int] = {}
        self._cold: set[PythonCommand] = set()

    async def run(
        self, words: Sequence[str], stdin: bytes, environment: Mapping[str, str], variables: Mapping[str, str]
    ) -> bytes:
        """Standard output of a command; raises as `arborl.child_process.run_command`.

        Args:
            words: program and arguments.
            stdin: its standard input.
            environment: environment variables that are equal in all episodes.
            variables: further ones, of this episode.
        """
        command = PythonCommand.parse(words)
        while command is not None and command not in self._cold:
            template = None
            try:
                template = await self._template(command, environment, sorted(variables))
                started = await template.open_episode(variables)
            except TemplateError as error:
                self._failed(command, template, error)
            else:
                return await communicate(started, stdin, None, MAX_OUTPUT)
        return await run_command(words, stdin, {**environment, **variables})

    async def close(self) -> None:
        """End all templates, and what still runs under them."""
        starting = list(self._starting.values())
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        templates = [*self._templates.values(), *self._replaced]
        self._templates.clear()
        self._replaced.clear()
        await asyncio.gather(*(template.close() for template in templates))

    async def _template(
        self, command: PythonCommand, environment: Mapping[str, str], variables: list[str]
    ) -> TemplateProcess:
        """The template of a command, started on the first call and after a change."""
        try:
            place = (dict(environment), os.getcwd(), variables)
        except FileNotFoundError:
            raise TemplateError("the working folder was removed") from None
        template = self._templates.get(command)
        if template is not None and not template.is_current(place):
            del self._templates[command]
            template.release()  # its episodes continue
            self._replaced = {one for one in self._replaced if one.is_running} | {template}
            template = None
        if template is not None:
            return template
        starting = self._starting.get(command)
        if starting is None:
            starting = self._starting[command] = asyncio.create_task(self._start(command, place))
            starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark as retrieved
        with paused_deadlines():
            return await asyncio.shield(starting)

    async def _start(self, command: PythonCommand, place: tuple[dict[str, str], str, list[str]]) -> TemplateProcess:
        try:
            template = self._templates[command] = await TemplateProcess.start(command, *place)
        finally:
            del self._starting[command]
        name = shlex.join(command.words)
        for module, reason in template.report["skipped"].items():
            log.info("command %s: %s is imported in each episode: %s", name, module, reason)
        if template.report["stop"]:
            log.info("command %s: imports after %s are made in each episode", name, template.report["stop"])
        return template

    def _failed(self, command: PythonCommand, template: TemplateProcess | None, error: TemplateError) -> None:
        """Count the death of a template. A command whose template did not start, or died too often, is run without
        one from now on, with one warning."""
        if template is not None and self._templates.get(command) is template:
            del self._templates[command]
            template.release()
            self._replaced.add(template)
            self._deaths[command] = self._deaths.get(command, 0) + 1
        if command in self._cold or (template is not None and self._deaths.get(command, 0) < MAX_DEATHS):
            return
        self._cold.add(command)
        log.warning(
            "command %s: a new interpreter is started for each episode, because its packages cannot be imported once "
            "for all: %s (agent.args.warm=false does the same without this warning)",
            shlex.join(command.words),
            error,
        )


class TemplateProcess:
    """A template process under a supervisor, and the socket over which it gets episodes."""

    def __init__(self, child: asyncio.subprocess.Process, control: socket.socket, place: Any, stdout: Any):
        self.child, self.control, self.place = child, control, place
        self.report: dict[str, Any] = {}
        self._stdout = stdout

    @classmethod
    async def start(
        cls, command: PythonCommand, environment: dict[str, str], folder: str, variables: list[str]
    ) -> TemplateProcess:
        """Start a template and wait for its imports."""
        ours, theirs = socket.socketpair()
        _, stdout, write_end = await output_pipe()
        words = [command.words[0], *command.options, python_template.__file__]
        settings = json.dumps(_settings(command, folder, variables, theirs.fileno()))
        pipe = asyncio.subprocess.PIPE
        try:
            child = await asyncio.create_subprocess_exec(
                *supervised_command([*words, settings]), stdin=pipe, stdout=write_end, stderr=pipe, env=environment,
                cwd=folder, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            ours.close()
            stdout.close()
            raise TemplateError(str(error)) if isinstance(error, OSError) else error from None
        finally:
            os.close(write_end)
            theirs.close()
        template = cls(child, ours, (environment, folder, variables), stdout)
        try:
            await template._read_report()
        except BaseException:
            await template.close()
            raise
        return template

    async def _read_report(self) -> None:
        self.control.setblocking(False)
        loop, data = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not data.endswith(b"\n"):
                    part = await loop.sock_recv(self.control, 2**16)
                    if not part:
                        assert self.child.stderr is not None
                        errors = (await self.child.stderr.read()).decode(errors="replace").strip()
                        raise TemplateError(errors or "its template ended")
                    data += part
        except TimeoutError:
            raise TemplateError(f"its imports did not end within {START_SECONDS:g} s") from None
        except OSError as error:
            raise TemplateError(str(error)) from error
        self.report = json.loads(data)

    @property
    def is_running(self) -> bool:
        return self.child.returncode is None

    def is_current(self, place: Any) -> bool:
        """Whether the program and its surroundings are those of the start."""
        return bool(self.place == place and all(_stamp(path) == old for path, old in self.report["files"].items()))

    async def open_episode(self, variables: Mapping[str, str]) -> ForkedCommand:
        """Fork a process with these variables."""
        ours, theirs = socket.socketpair()
        stdin, stdin_end = os.pipe()
        output, transport, stdout = await output_pipe()
        try:
            await self._send(stdin, stdout, theirs.fileno())
            command = ForkedCommand(ours, stdin_end, output, transport)
        except BaseException as error:
            ours.close()
            os.close(stdin_end)
            transport.close()
            raise TemplateError(f"its template ended ({error})") if isinstance(error, OSError) else error from None
        finally:
            os.close(stdin)
            os.close(stdout)
            theirs.close()
        try:
            await command.start({"environment": dict(variables)})
        except BaseException:
            command.terminate()
            await command.close()
            raise
        return command

    async def _send(self, *descriptors: int) -> None:
        while True:
            try:
                socket.send_fds(self.control, [b"e"], list(descriptors))
            except BlockingIOError:  # it has not read the last ones
                await asyncio.sleep(0.005)
            else:
                return

    def release(self) -> None:
        """Let the template end after its episodes."""
        self.control.close()

    async def close(self) -> None:
        """End the template and its episodes, and wait for their end."""
        command = StartedCommand(self.child, asyncio.StreamReader(), self._stdout)
        command.terminate()  # before the template ends by itself: asyncio may lose the exit code of an ended process
        self.control.close()
        await command.close()


class ForkedCommand(StartedCommand):
    """A process that a template forked. Its supervisor reports over a socket, and ends it when that is closed."""

    def __init__(self, line: socket.socket, stdin: int, output: asyncio.StreamReader, transport: asyncio.ReadTransport):
        self.line, self.stdin, self.output, self.transport = line, stdin, output, transport
        self._reader: asyncio.StreamReader | None = None
        self._supervisor: int | None = None

    async def start(self, request: Mapping[str, Any]) -> None:
        """Send the request and wait until the process runs."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self.line)
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            if not (words := (await self._reader.readline()).split()):
                raise TemplateError("its template ended")
            self._supervisor = int(words[1])
        except OSError as error:
            raise TemplateError(f"its template ended ({error})") from error

    async def write(self, stdin: bytes) -> None:
        loop, file = asyncio.get_running_loop(), os.fdopen(self.stdin, "wb", 0)
        self.stdin = -1
        pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, file)
        pipe.write(stdin)
        pipe.close()

    async def read_failure(self) -> str | None:
        assert self._reader is not None
        try:
            code, _, errors = (await self._reader.read()).partition(b"\n")
        except OSError:
            code, errors = b"", b""
        if not code:
            return "its supervisor was killed"
        text = f"{errors.decode(errors='replace')} (exit code {int(code)})"
        return None if code == b"0" else text.strip()

    def terminate(self) -> None:
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        """Wait for the end of all processes, which closes the socket; a second cancellation does not interrupt this."""
        if self.stdin >= 0:
            os.close(self.stdin)
        if self._reader is None:
            self.line.close()
        else:
            ending = asyncio.ensure_future(self._read_to_end())
            while not ending.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([ending])
            self._writer.close()
        self.transport.close()

    async def _read_to_end(self) -> None:
        """A supervisor that is stopped or stuck is killed, and its process ends with it."""
        assert self._reader is not None
        for _ in range(2):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    while await self._reader.read(2**16):
                        pass
                return
            if self._supervisor is not None:
                with suppress(ProcessLookupError):
                    os.kill(self._supervisor, signal.SIGKILL)


def can_fork() -> bool:
    """Forks are safe on Linux; libraries of macOS may crash after one."""
    return sys.platform == "linux"


def _settings(command: PythonCommand, folder: str, variables: list[str], control: int) -> dict[str, Any]:
    script = command.script
    return {
        "control": control, "variables": variables, "skipped": {}, "words": command.words, "options": command.options,
        "script": script, "file": script and os.path.join(folder, script),
        "module": command.module, "arguments": command.arguments,
        "child_process": os.path.abspath(child_process.__file__),
    }  # fmt: skip


def _stamp(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]
