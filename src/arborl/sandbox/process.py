"""One guest, seen from the host: started, given code, watched, ended."""

from __future__ import annotations

import asyncio
import marshal
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from arborl.errors import ArborError
from arborl.sandbox.inside.clear import remove
from arborl.sandbox.limits import Limits, Outcome, Stopped
from arborl.sandbox.protocol import OK, RAISED, READY, Answer, Line, request
from arborl.sandbox.watch import Meter, Usage, buffers, freeze, shared_out, size, thaw

Level = Literal["bubblewrap", "namespaces", "rlimits"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces", "rlimits")

INSIDE = Path(__file__).parent / "inside"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
HOME = "/box"
MB = 2**20
TICK = 0.05
START_SECONDS = 20.0
OUT_OF_MEMORY = 250
"""The exit code of `inside/keeper.py` where the kernel ended a guest at the limit of its cgroup."""


class SandboxError(ArborError):
    """A guest could not be started; nothing has been run."""


class SandboxProcess:
    """A Python process at one level of isolation, whatever that is worth here; `Sandbox` chooses the level."""

    def __init__(self, limits: Limits | None, level: Level, packages: Sequence[str | Path] = ()):
        if level == "bubblewrap" and shutil.which("bwrap") is None:
            raise SandboxError("bwrap is not installed (apt install bubblewrap)")
        self.limits, self.level = limits or Limits(), level
        self.fences: tuple[str, ...] = ()
        self._folder = os.path.join(tempfile.gettempdir(), f"arborl-box-{secrets.token_hex(8)}")  # made by its keeper
        self._home = self._folder if level == "rlimits" else HOME
        self._lock = threading.RLock()  # held while code runs; the end of the guest waits for it
        self._open, self._killed = True, False
        self._rest: Usage | None = None  # what it had used when it was last stopped
        try:
            self._start([str(Path(folder).resolve()) for folder in packages])
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------ life

    def _start(self, packages: list[str]) -> None:
        limits = self.limits
        python = getattr(sys, "_base_executable", "") or sys.executable
        readable = [*SYSTEM, os.path.realpath(sys.base_prefix), sysconfig.get_path("stdlib")]
        readable += packages if self.level == "rlimits" else []
        plan: dict[str, Any] = {
            "level": self.level, "root": self._folder, "home": self._home, "readable": sorted(set(readable)),
            "packages": packages, "python": os.path.realpath(python), "bubblewrap": shutil.which("bwrap") or "",
            "memory": limits.memory_mb * MB, "file": limits.file_mb * MB, "disk": limits.disk_mb * MB,
            "processes": limits.processes, "open_files": limits.open_files, "nice": 0, "uid": 0,
        }  # fmt: skip
        ours, theirs = socket.socketpair()
        self._line = Line(ours)
        lifeline, self._lifeline = os.pipe()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        command = [plan["python"], "-I", "-S", str(INSIDE / "keeper.py"), marshal.dumps(plan).hex()]
        command.append(str(theirs.fileno()))
        try:
            self._keeper = subprocess.Popen(
                command, stdin=lifeline, stdout=out, stderr=err, pass_fds=(theirs.fileno(),), env={}, cwd="/",
                start_new_session=True,
            )  # fmt: skip
            self._meter = Meter(self._keeper.pid)
        finally:
            theirs.close()
            for theirs_too in (lifeline, out, err):
                os.close(theirs_too)
        for descriptor in (self._out, self._err):
            os.set_blocking(descriptor, False)
        self._greeting()

    def _greeting(self) -> None:
        """Wait until the guest says that it is there, and with which fences."""
        deadline = time.perf_counter() + START_SECONDS
        answer, why = None, "it did not answer"
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        while answer is None and (left := deadline - time.perf_counter()) > 0:
            poll.poll(left * 1000)
            try:
                answer = self._line.move()
            except (OSError, ValueError) as error:
                why = str(error)
                break
        if answer is None:
            told = drain(self._err, 2000).decode(errors="replace").strip()
            raise SandboxError(f"no guest at level {self.level!r}: {told or why}")
        if answer.kind != READY:
            raise SandboxError(f"no guest at level {self.level!r}: {answer.texts[0] or 'no reason given'}")
        self.fences = tuple(filter(None, answer.texts[0].split(",")))

    @property
    def alive(self) -> bool:
        """Whether it can run another piece of code."""
        return self._open and not self._killed and self._keeper.poll() is None

    def close(self) -> None:
        """End the guest and all that it started. May be called from any thread, and twice."""
        if not hasattr(self, "_lock"):  # it never began
            return
        if not self._lock.acquire(blocking=False):
            self.kill()
            self._lock.acquire()
        try:
            if self._open:
                self._open = False
                self._end()
        finally:
            self._lock.release()

    def kill(self) -> None:
        """Make the guest end now; a `run` under way answers that it died."""
        self._killed = True
        if hasattr(self, "_keeper"):
            self._keeper.kill()  # the guest's processes are bound to the keeper's life

    def _end(self) -> None:
        if hasattr(self, "_keeper"):
            os.close(self._lifeline)
            try:
                self._keeper.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
                self._keeper.wait()
            self._line.close()
            os.close(self._out)
            os.close(self._err)
        remove(self._folder)  # left only where the keeper was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    # ------------------------------------------------------------------------------------------------ code

    async def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Outcome:
        """As `run_sync`, beside the event loop. Cancelling it ends the guest."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome | None, error: BaseException | None) -> None:
            if done.done():
                return
            done.set_exception(error) if error is not None else done.set_result(outcome)  # type: ignore[arg-type]

        def work() -> None:
            outcome, error = None, None
            try:
                outcome = self.run_sync(code, stdin, files)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, outcome, error)

        threading.Thread(target=work, name="arborl-sandbox", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self.kill()
            raise

    def run_sync(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Outcome:
        """Run one piece of code and say what became of it; what the code does wrong is never an exception here.

        Args:
            code: Python. If its last line is an expression, its value is part of the outcome.
            stdin: what it reads from standard input.
            files: written to its folder before; names are relative.
        """
        with self._lock:
            return self._run(code, stdin, files)

    def _run(self, code: str, stdin: str, files: Mapping[str, str] | None) -> Outcome:
        start = time.perf_counter()
        if not self.alive:
            return Outcome(False, error="the sandbox has ended", stopped="died")
        before, rest = self._meter.read(), self._rest
        if rest is not None and before.cpu - rest.cpu > 2 * TICK:  # it was to stand still, and found a way not to
            return self._ended("cpu", Written(), start)
        try:
            self._line.ask(*request(code, stdin, files or {}))
        except ValueError:
            return self._ended("forged", Written(), start)
        except OSError:
            return self._ended("died", Written(), start)
        thaw(self._keeper.pid)
        return self._follow(start, before)

    def _follow(self, start: float, before: Usage) -> Outcome:
        """Send the request and read what the guest writes until it has answered whole, passes a limit or ends.

        Every wait is a tick at most, and the limits are looked at between any two: a guest that reads or answers a byte
        at a time gains nothing.
        """
        said = Written()
        poll = select.poll()
        for readable in (self._out, self._err):
            poll.register(readable, select.POLLIN)
        checked = start
        while True:
            now = time.perf_counter()
            left = start + self.limits.wall_seconds - now
            if left <= 0:
                return self._ended("wall", said, start)
            if now - checked >= TICK:
                if passed := self._passed(before, self._meter.read()):
                    return self._ended(passed, said, start)
                checked = time.perf_counter()
            poll.register(self._line.fileno(), self._line.events)
            events = dict(poll.poll(min(TICK, left) * 1000))
            if self._drain(said) > self.limits.output_bytes:
                return self._ended("output", said, start)
            try:
                answer = self._line.move() if self._line.fileno() in events else None
            except ValueError:
                return self._ended("forged", said, start)
            except OSError:
                return self._ended("died", said, start)
            if answer is not None:
                return self._answered(answer, said, start, before)

    def _passed(self, before: Usage, now: Usage) -> Stopped:
        """The limit on all processes together that has been passed, if any."""
        limits = self.limits
        memory, disk = limits.memory_mb * MB, limits.disk_mb * MB
        if now.cpu - before.cpu > limits.cpu_seconds:
            return "cpu"
        if now.uncounted:
            return "children"
        if now.processes > limits.processes + 4:  # the guest itself and what keeps it
            return "processes"
        held = buffers(self._keeper.pid, limits.open_files)
        if now.memory + held > memory and shared_out(self._keeper.pid) + held > memory:
            return "memory"
        if self.level == "rlimits" and size(self._folder, self._keeper.pid, disk, limits.file_mb * MB) > disk:
            return "disk"
        return ""

    def _answered(self, answer: Answer, said: Written, start: float, before: Usage) -> Outcome:
        """The outcome of code that has answered; until the next request the guest stands still, within its limits."""
        if answer.kind not in (OK, RAISED):
            return self._ended("forged", said, start)
        if not freeze(self._keeper.pid):
            return self._ended("processes", said, start)
        self._rest = self._meter.read()
        if passed := self._passed(before, self._rest):
            return self._ended(passed, said, start)
        if self._drain(said) > self.limits.output_bytes:
            return self._ended("output", said, start)
        value, error = answer.texts
        seconds = time.perf_counter() - start
        return Outcome(answer.kind == OK, _text(said.out), _text(said.err), value, error, seconds=seconds)

    def _drain(self, said: Written) -> int:
        """Read what has been written, a little beyond the limit at most; returns how much that is."""
        for descriptor, kept in ((self._out, said.out), (self._err, said.err)):
            kept += drain(descriptor, self.limits.output_bytes - len(said.out) - len(said.err))
        return len(said.out) + len(said.err)

    def _ended(self, why: Stopped, said: Written, start: float) -> Outcome:
        """The outcome of code that cost its guest."""
        seconds = time.perf_counter() - start
        self._drain(said)
        self.close()
        code, limits = self._keeper.returncode or 0, self.limits
        if why == "died" and code == OUT_OF_MEMORY:
            why = "memory"
        how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        error = {
            "wall": f"stopped: ran longer than {limits.wall_seconds:g} s",
            "cpu": f"stopped: used more than {limits.cpu_seconds:g} s of processor time",
            "memory": f"stopped: used more than {limits.memory_mb} MB of memory",
            "children": "stopped: ignored SIGCHLD, so that nobody could count its children's processor time",
            "processes": f"stopped: started more than {limits.processes} processes",
            "disk": f"stopped: wrote more than {limits.disk_mb} MB of files",
            "output": f"stopped: printed more than {limits.output_bytes:,} bytes",
            "forged": "stopped: wrote to the descriptor that its answers are sent by",
            "died": f"the process ended ({how})",
        }[why]
        whole = limits.output_bytes
        return Outcome(False, _text(said.out[:whole]), _text(said.err[:whole]), "", error, why, seconds)


@dataclass(slots=True)
class Written:
    """What a guest has printed so far."""

    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)


def drain(descriptor: int, limit: int) -> bytes:
    """What is there to read now, up to a little over `limit`."""
    data = bytearray()
    while len(data) <= limit:
        try:
            part = os.read(descriptor, 65536)
        except OSError:
            break
        if not part:
            break
        data += part
    return bytes(data)


def _text(data: bytearray) -> str:
    return data.decode(errors="replace")
