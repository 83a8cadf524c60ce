"""The sandbox: the best isolation level of this machine, and a Python process ("guest") at that level."""

from __future__ import annotations

import asyncio
import functools
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
from typing import Any, Literal, Self

from arborl.errors import ArborError
from arborl.sandbox import process_usage
from arborl.sandbox.guest_process.guest_resources import remove_folder
from arborl.sandbox.sandbox_protocol import (
    OK,
    RAISED,
    READY,
    GuestChannel,
    GuestMessage,
    SandboxLimits,
    SandboxResult,
    StopReason,
    encode_request,
)

Level = Literal["bubblewrap", "namespaces", "rlimits"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces", "rlimits")

GUEST_FOLDER = Path(__file__).parent / "guest_process"
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
GUEST_HOME = "/box"
MB = 2**20
TICK = 0.05
START_SECONDS = 20.0
OUT_OF_MEMORY = 250  # exit code of `guest_supervisor.py` after an out-of-memory kill in its cgroup


class SandboxError(ArborError):
    """The sandbox could not be started; no code was run."""


LEVEL_TEXT: dict[Level, str] = {
    "bubblewrap": "bubblewrap: separate file system, processes and network",
    "namespaces": "kernel name spaces: separate file system, processes and network",
    "rlimits": "resource limits: one process in its own folder",
}
RESTRICTION_TEXT = {"user": "a separate user", "cgroup": "a memory cgroup"}


@dataclass(frozen=True, slots=True)
class ActiveLevel:
    """Isolation level of this machine's sandboxes."""

    name: Level
    restrictions: tuple[str, ...]
    """`seccomp`: filtered system calls. `cgroup`: the kernel limits the memory of all processes together. At the level
    `rlimits` also `landlock`: restricted files; and `user`: root's code runs as another user."""
    unavailable: dict[str, str]  # better level -> why it does not work

    @property
    def is_isolated(self) -> bool:
        """Whether code can neither read the user's files nor reach the network."""
        return self.name != "rlimits" or {"seccomp", "landlock"} <= set(self.restrictions)

    def __str__(self) -> str:
        names = [RESTRICTION_TEXT.get(name, name) for name in self.restrictions]
        text = f", restricted by {' and '.join(names)}" if names else ""
        text += "" if self.is_isolated else "; NOT ISOLATED: code has the rights of this user"
        return f"{LEVEL_TEXT[self.name]}{text}"


_unsafe_allowed = threading.Event()


def allow_unsafe(allowed: bool) -> None:
    """Allow or forbid code in sandboxes without isolation; forbidden by default."""
    _unsafe_allowed.set() if allowed else _unsafe_allowed.clear()


def unsafe_allowed() -> bool:
    """The value of `allow_unsafe`; worker processes must get the same."""
    return _unsafe_allowed.is_set()


def active_level() -> ActiveLevel:
    """Isolation level of this process's sandboxes; SandboxError without isolation unless `allow_unsafe`."""
    found = best_level()
    if not found.is_isolated and not _unsafe_allowed.is_set():
        reasons = "; ".join(f"{level}: {why}" for level, why in found.unavailable.items())
        raise SandboxError(
            "no isolation works on this machine: code of a model could read and write your files and reach the network "
            f"({reasons}; and no Landlock with seccomp). Install bubblewrap, allow user name spaces, or, on a machine "
            "without valuable data, write sandbox.allow_unsafe=true (arborl.sandbox.allow_unsafe(True))"
        )
    return found


@functools.lru_cache(maxsize=1)
def best_level() -> ActiveLevel:
    """The best level that starts a sandbox on this machine; SandboxError with all reasons if none does."""
    unavailable: dict[str, str] = {}
    for level in LEVELS:
        try:
            return ActiveLevel(level, try_level(level), unavailable)
        except SandboxError as error:
            unavailable[level] = str(error)
    raise SandboxError(
        "no sandbox works on this machine. " + " ".join(f"{level}: {why}." for level, why in unavailable.items())
    )


def try_level(level: Level) -> tuple[str, ...]:
    """Start a sandbox, run a test, and return its restrictions; SandboxError if it fails."""
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}")
    with Sandbox(SandboxLimits(), level) as sandbox:
        result = sandbox.run_sync("1 + 1")
        if result.value != "2":
            raise SandboxError(f"the test at level {level!r} failed: {result.error or result.stderr}")
        return sandbox.restrictions


class Sandbox:
    """An isolated Python process; variables persist between runs, until `close`.

    Example:
        with Sandbox() as sandbox:
            sandbox.run_sync("x = 6")
            sandbox.run_sync("x * 7").value          # '42'
            sandbox.run_sync("while True: pass")     # SandboxResult(ok=False, stopped='cpu', …); the process has ended

    Args:
        limits: resource limits.
        level: isolation level; by default the best that works (`arborl.sandbox.best_level`), and SandboxError if that
            does not isolate.
        packages: folders with Python packages for the code; they must be readable by all users.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, level: Level | None = None, packages: Sequence[str | Path] = ()
    ):
        level = level or active_level().name
        if level == "bubblewrap" and shutil.which("bwrap") is None:
            raise SandboxError("bwrap is not installed (apt install bubblewrap)")
        self.limits, self.level = limits or SandboxLimits(), level
        self.restrictions: tuple[str, ...] = ()
        # The supervisor creates the folder.
        self._folder = os.path.join(tempfile.gettempdir(), f"arborl-box-{secrets.token_hex(8)}")
        self._home = self._folder if level == "rlimits" else GUEST_HOME
        self._lock = threading.RLock()  # held while code runs
        self._open, self._killed = True, False
        self._usage_at_rest: process_usage.ProcessUsage | None = None  # usage when it was last stopped
        try:
            self._start([str(Path(folder).resolve()) for folder in packages])
        except BaseException:
            self.close()
            raise

    def _start(self, packages: list[str]) -> None:
        limits = self.limits
        python = getattr(sys, "_base_executable", "") or sys.executable
        readable = [*SYSTEM_PATHS, os.path.realpath(sys.base_prefix), sysconfig.get_path("stdlib")]
        readable += packages if self.level == "rlimits" else []
        plan: dict[str, Any] = {
            "level": self.level, "root": self._folder, "home": self._home, "readable": sorted(set(readable)),
            "packages": packages, "python": os.path.realpath(python), "bubblewrap": shutil.which("bwrap") or "",
            "memory": limits.memory_mb * MB, "file": limits.file_mb * MB, "disk": limits.disk_mb * MB,
            "processes": limits.processes, "open_files": limits.open_files, "nice": 0, "uid": 0,
        }  # fmt: skip
        host_end, guest_end = socket.socketpair()
        self._channel = GuestChannel(host_end)
        guest_pipe, self._host_pipe = os.pipe()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        command = [plan["python"], "-I", "-S", str(GUEST_FOLDER / "guest_supervisor.py"), marshal.dumps(plan).hex()]
        command.append(str(guest_end.fileno()))
        try:
            self._supervisor = subprocess.Popen(
                command, stdin=guest_pipe, stdout=out, stderr=err, pass_fds=(guest_end.fileno(),), env={}, cwd="/",
                start_new_session=True,
            )  # fmt: skip
            self._meter = process_usage.UsageMeter(self._supervisor.pid)
        finally:
            guest_end.close()
            for descriptor in (guest_pipe, out, err):
                os.close(descriptor)
        for descriptor in (self._out, self._err):
            os.set_blocking(descriptor, False)
        self._wait_ready()

    def _wait_ready(self) -> None:
        """Wait for the first message, which lists the restrictions in force."""
        deadline = time.perf_counter() + START_SECONDS
        message, reason = None, "no response"
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while message is None and (left := deadline - time.perf_counter()) > 0:
            poll.poll(left * 1000)
            try:
                message = self._channel.transfer()
            except (OSError, ValueError) as error:
                reason = str(error)
                break
        if message is None:
            stderr = read_available(self._err, 2000).decode(errors="replace").strip()
            raise SandboxError(f"no sandbox at level {self.level!r}: {stderr or reason}")
        if message.kind != READY:
            raise SandboxError(f"no sandbox at level {self.level!r}: {message.texts[0] or 'unknown reason'}")
        self.restrictions = tuple(filter(None, message.texts[0].split(",")))

    @property
    def alive(self) -> bool:
        return self._open and not self._killed and self._supervisor.poll() is None

    def close(self) -> None:
        """End the guest and all its processes. May be called from any thread, and twice."""
        if not hasattr(self, "_lock"):  # the constructor failed
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
        """End the guest now; a running `run` returns `died`."""
        self._killed = True
        if hasattr(self, "_supervisor"):
            self._supervisor.kill()  # the guest's processes end with it

    def _end(self) -> None:
        if hasattr(self, "_supervisor"):
            os.close(self._host_pipe)
            try:
                self._supervisor.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
                self._supervisor.wait()
            self._channel.close()
            os.close(self._out)
            os.close(self._err)
        remove_folder(self._folder)  # exists only if the supervisor was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    async def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """As `run_sync`, in a thread. Cancellation ends the guest."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[SandboxResult] = loop.create_future()

        def settle(result: SandboxResult | None, error: BaseException | None) -> None:
            if done.done():
                return
            done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = self.run_sync(code, stdin, files)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, name="arborl-sandbox", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self.kill()
            raise

    def run_sync(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Run code. Failures of the code are results, not exceptions."""
        with self._lock:
            return self._run(code, stdin, files)

    def _run(self, code: str, stdin: str, files: Mapping[str, str] | None) -> SandboxResult:
        start = time.perf_counter()
        if not self.alive:
            return SandboxResult(False, error="the sandbox has ended", stopped="died")
        before, at_rest = self._meter.read(), self._usage_at_rest
        if at_rest is not None and before.cpu - at_rest.cpu > 2 * TICK:  # it ran although it was stopped
            return self._stop("cpu", CapturedOutput(), start)
        try:
            self._channel.start_request(*encode_request(code, stdin, files or {}))
        except ValueError:
            return self._stop("forged", CapturedOutput(), start)
        except OSError:
            return self._stop("died", CapturedOutput(), start)
        process_usage.resume_descendants(self._supervisor.pid)
        return self._follow(start, before)

    def _follow(self, start: float, before: process_usage.ProcessUsage) -> SandboxResult:
        """Exchange data until the guest responds, exceeds a limit or ends. Limits are checked at least every `TICK`,
        also while a guest reads or writes byte by byte."""
        captured = CapturedOutput()
        poll = select.poll()
        for readable in (self._out, self._err):
            poll.register(readable, select.POLLIN)
        checked = start
        while True:
            now = time.perf_counter()
            left = start + self.limits.wall_seconds - now
            if left <= 0:
                return self._stop("wall", captured, start)
            if now - checked >= TICK:
                if limit := self._exceeded_limit(before, self._meter.read()):
                    return self._stop(limit, captured, start)
                checked = time.perf_counter()
            poll.register(self._channel.fileno(), self._channel.events)
            events = dict(poll.poll(min(TICK, left) * 1000))
            if self._read_output(captured) > self.limits.output_bytes:
                return self._stop("output", captured, start)
            try:
                message = self._channel.transfer() if self._channel.fileno() in events else None
            except ValueError:
                return self._stop("forged", captured, start)
            except OSError:
                return self._stop("died", captured, start)
            if message is not None:
                return self._finish(message, captured, start, before)

    def _exceeded_limit(self, before: process_usage.ProcessUsage, now: process_usage.ProcessUsage) -> StopReason:
        limits = self.limits
        memory, disk = limits.memory_mb * MB, limits.disk_mb * MB
        if now.cpu - before.cpu > limits.cpu_seconds:
            return "cpu"
        if now.uncounted:
            return "children"
        if now.processes > limits.processes + 4:  # the guest, its supervisor and helpers
            return "processes"
        held = process_usage.kernel_buffer_bytes(self._supervisor.pid, limits.open_files)
        if now.memory + held > memory and process_usage.proportional_memory(self._supervisor.pid) + held > memory:
            return "memory"
        if (
            self.level == "rlimits"
            and process_usage.disk_usage(self._folder, self._supervisor.pid, disk, limits.file_mb * MB) > disk
        ):
            return "disk"
        return ""

    def _finish(
        self, message: GuestMessage, captured: CapturedOutput, start: float, before: process_usage.ProcessUsage
    ) -> SandboxResult:
        """Result of code that responded. The guest is stopped until the next request."""
        if message.kind not in (OK, RAISED):
            return self._stop("forged", captured, start)
        if not process_usage.freeze_descendants(self._supervisor.pid):
            return self._stop("processes", captured, start)
        self._usage_at_rest = self._meter.read()
        if limit := self._exceeded_limit(before, self._usage_at_rest):
            return self._stop(limit, captured, start)
        if self._read_output(captured) > self.limits.output_bytes:
            return self._stop("output", captured, start)
        value, error = message.texts
        seconds = time.perf_counter() - start
        return SandboxResult(
            message.kind == OK, _text(captured.out), _text(captured.err), value, error, seconds=seconds
        )

    def _read_output(self, captured: CapturedOutput) -> int:
        """Read available output, at most slightly beyond the limit; returns its total size."""
        for descriptor, kept in ((self._out, captured.out), (self._err, captured.err)):
            kept += read_available(descriptor, self.limits.output_bytes - len(captured.out) - len(captured.err))
        return len(captured.out) + len(captured.err)

    def _stop(self, reason: StopReason, captured: CapturedOutput, start: float) -> SandboxResult:
        """End the guest; result of code that exceeded a limit."""
        seconds = time.perf_counter() - start
        self._read_output(captured)
        self.close()
        code, limits = self._supervisor.returncode or 0, self.limits
        if reason == "died" and code == OUT_OF_MEMORY:
            reason = "memory"
        how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        error = {
            "wall": f"stopped: ran longer than {limits.wall_seconds:g} s",
            "cpu": f"stopped: used more than {limits.cpu_seconds:g} s of processor time",
            "memory": f"stopped: used more than {limits.memory_mb} MB of memory",
            "children": "stopped: ignored SIGCHLD, which hides its children's processor time",
            "processes": f"stopped: started more than {limits.processes} processes",
            "disk": f"stopped: wrote more than {limits.disk_mb} MB of files",
            "output": f"stopped: printed more than {limits.output_bytes:,} bytes",
            "forged": "stopped: wrote to the control descriptor",
            "died": f"the process ended ({how})",
        }[reason]
        whole = limits.output_bytes
        return SandboxResult(
            False, _text(captured.out[:whole]), _text(captured.err[:whole]), "", error, reason, seconds
        )


@dataclass(slots=True)
class CapturedOutput:
    """Output of a guest so far."""

    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)


def read_available(descriptor: int, limit: int) -> bytes:
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
