"""Child processes that end with their parent, together with every process that they start.

`python child_process.py PROGRAM …` runs one command under two processes; the script imports the standard library only.
The supervisor starts the command. On Linux it is a child subreaper: a descendant whose parent ends becomes a child of
the supervisor, whatever session or process group it moved to. When the command ends, the supervisor kills all remaining
descendants. The front process is the one that the caller sees; it holds a pipe to the supervisor. When the front
process gets SIGTERM, is killed, or loses its parent, the pipe closes and the supervisor kills the command. The front
process ends after the supervisor, so no process of the command is left when it has ended (if the front process itself
is killed: a moment later).

Standard input and output belong to the command, and so do descriptors passed by the caller. The last lines of its
standard error are written when it fails, with its exit code. The front process ends as the command did, with its exit
code or by its signal.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # the script imports little, to start fast
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

STDERR_LINES, STDERR_LINE_BYTES = 20, 4096
KEEP_STDERR = "--keep-stderr"
PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0
"""Time limit for killing descendants; the kernel may hold a process longer."""
TRACKER_SECONDS = 5.0
"""Time in which Python's `resource_tracker` may free shared memory; it ends by itself after the processes it serves."""
MAX_OUTPUT = 2**20
DRAIN_SECONDS = 1.0
"""Time to read the rest of standard output after the end of the command: a process elsewhere may hold the pipe."""


class CommandFailed(Exception):
    """The command failed, printed too much, or did not end in time."""


def supervised_command(command: Sequence[str], keep_stderr: bool = False) -> list[str]:
    """The command line that runs `command` under a supervisor. SIGTERM to its process kills the whole tree.

    Args:
        command: the program and its arguments.
        keep_stderr: leave standard error to the command instead of writing its last lines after a failure.
    """
    options = [KEEP_STDERR] if keep_stderr else []
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *options, *command]


async def run_command(
    command: Sequence[str],
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    max_output: int = MAX_OUTPUT,
) -> bytes:
    """Run a supervised command and return its standard output. Cancellation kills the whole process tree.

    Raises:
        CommandFailed: exit code other than 0 (with the last lines of standard error), more than `max_output` bytes of
            output, or the timeout.
    """
    return await communicate(await _start(command, env), stdin, timeout, max_output)


class StartedCommand:
    """A supervised command that runs, with its standard streams."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
    ):
        self.child, self.output, self.transport = child, output, transport

    async def write(self, stdin: bytes) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(stdin)
        self.child.stdin.close()

    async def read_failure(self) -> str | None:
        """What the supervisor reports at the end; None after exit code 0."""
        assert self.child.stderr is not None
        errors = await self.child.stderr.read()  # only the supervisor holds this pipe
        return errors.decode(errors="replace").strip() if errors else None  # asyncio may not know the exit code

    def terminate(self) -> None:
        """Not `child.terminate`, which polls the process: asyncio then loses its exit code and logs a warning."""
        if self.child.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGTERM)

    async def close(self) -> None:
        """Wait for the end of all processes, then close the streams."""
        await _wait_for_end(self.child)
        self.transport.close()


async def communicate(command: StartedCommand, stdin: bytes, timeout: float | None, max_output: int) -> bytes:
    """Standard output of a started command; raises as `run_command`."""
    import asyncio

    output = bytearray()

    async def read_output() -> None:
        while part := await command.output.read(2**16):  # to the end: a full pipe would delay the end of the process
            if len(output) <= max_output:
                output.extend(part)
                if len(output) > max_output:
                    command.terminate()

    reading, ended = asyncio.create_task(read_output()), False
    try:
        async with asyncio.timeout(timeout):
            await command.write(stdin)
            failure = await command.read_failure()
            await asyncio.wait([reading], timeout=DRAIN_SECONDS)
            ended = True
    except TimeoutError:
        raise CommandFailed(f"it did not end within {timeout:g} s") from None
    finally:
        reading.cancel()
        if not ended:
            command.terminate()
        await command.close()
    if len(output) > max_output:
        raise CommandFailed(f"it printed more than {max_output:,} bytes")
    if failure is not None:
        raise CommandFailed(failure)
    return bytes(output)


async def _start(command: Sequence[str], env: Mapping[str, str] | None) -> StartedCommand:
    """Standard output is not a pipe of asyncio's subprocess: asyncio reports the end of a process only after those are
    closed."""
    import asyncio

    pipe = asyncio.subprocess.PIPE
    output, transport, write_end = await output_pipe()
    try:
        child = await asyncio.create_subprocess_exec(
            *supervised_command(command), stdin=pipe, stdout=write_end, stderr=pipe, env=env, start_new_session=True
        )
    except BaseException:
        transport.close()
        raise
    finally:
        os.close(write_end)
    return StartedCommand(child, output, transport)


async def output_pipe() -> tuple[asyncio.StreamReader, asyncio.ReadTransport, int]:
    """A pipe: its reader, the transport to close, and the descriptor to write to."""
    import asyncio

    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
    except BaseException:
        os.close(write_end)
        raise
    return reader, transport, write_end


async def _wait_for_end(child: asyncio.subprocess.Process) -> None:
    """A second cancellation does not interrupt this. A process that is stopped or stuck is killed."""
    import asyncio

    deadline = time.monotonic() + KILL_SECONDS + TRACKER_SECONDS
    while child.returncode is None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.002)
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                child.kill()


# ------------------------------------------------------------------------------------------------ the script


def main() -> None:
    parent = os.getppid()
    reading, writing = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(writing)
        supervise_command(reading)
    os.close(reading)
    _close_passed()
    pipe = [writing]

    def close_pipe(*_: object) -> None:
        while pipe:
            os.close(pipe.pop())

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        close_pipe()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, close_pipe)
    threading.Thread(target=watch_parent, daemon=True).start()
    _, status = os.waitpid(supervisor, 0)
    end_as(os.waitstatus_to_exitcode(status))


def end_as(code: int) -> None:
    """End this process with an exit code, or by a signal if the code is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def supervise_command(pipe: int) -> None:
    """Supervise the command of `sys.argv`."""
    keeps_stderr = sys.argv[1] == KEEP_STDERR
    command = sys.argv[1 + keeps_stderr :]

    def start() -> tuple[int, int | None]:
        try:  # descriptors that the caller passed are for the command
            child = subprocess.Popen(command, stderr=None if keeps_stderr else subprocess.PIPE, close_fds=False)
        except OSError as error:
            raise OSError(f"{command[0]}: {error.strerror}") from error
        _close_passed()
        child.returncode = 0  # `supervise` waits for it
        return child.pid, None if child.stderr is None else os.dup(child.stderr.fileno())

    def report(code: int, lines: bytes) -> None:
        if code and (lines or not keeps_stderr):
            os.write(2, b"%s (exit code %d)\n" % (lines, code))

    supervise(pipe, start, report)


def supervise(pipe: int, start: Callable[[], tuple[int, int | None]], report: Callable[[int, bytes], None]) -> None:
    """Run a command until it ends or the pipe closes, then kill its descendants and end as the command did.

    Args:
        pipe: the descriptor whose end kills the command.
        start: starts the command; returns its process id and the descriptor of its standard error.
        report: is called with the exit code and the last lines of standard error, unless the pipe was closed.
    """
    os.setsid()  # signals to the process group of the front process do not reach the supervisor
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    lines: deque[bytes] = deque(maxlen=STDERR_LINES)
    cancelled, code = threading.Event(), 127
    try:
        child, errors = start()
    except OSError as error:
        lines.append(str(error).encode())
    else:
        reader = threading.Thread(target=_read_stderr, args=(errors, lines), daemon=True)
        reader.start()
        threading.Thread(target=_kill_when_closed, args=(pipe, cancelled, child), daemon=True).start()
        code = _wait(child)
        reader.join(0.1)
    if not cancelled.is_set():
        with suppress(OSError):
            report(code, b"".join(lines.copy()).rstrip())
    kill_descendants()
    end_as(code)


def _close_passed() -> None:
    """Close the descriptors that the command has inherited: their other ends see when it ends."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                os.close(int(name))


def _read_stderr(errors: int | None, lines: deque[bytes]) -> None:
    if errors is not None:
        with os.fdopen(errors, "rb") as file:
            lines.extend(iter(lambda: file.readline(STDERR_LINE_BYTES), b""))


def _kill_when_closed(pipe: int, cancelled: threading.Event, child: int) -> None:
    with suppress(OSError):  # a socket may be reset
        os.read(pipe, 1)
    cancelled.set()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _wait(child: int) -> int:
    """Exit code of the command; adopted descendants are reaped meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def kill_descendants() -> None:
    """Kill all descendants of this process, repeatedly: one may start another before it is killed."""
    start, other_users = time.monotonic(), set[int]()
    if not os.path.isdir("/proc/self"):
        os.killpg(0, signal.SIGKILL)
    while (left := descendants() - other_users) and time.monotonic() < start + KILL_SECONDS:
        for pid in left:
            if time.monotonic() < start + TRACKER_SECONDS and _is_resource_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                other_users.add(pid)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _is_resource_tracker(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


def descendants() -> set[int]:
    """Living processes below this one."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= level
    return found


if __name__ == "__main__":
    main()
