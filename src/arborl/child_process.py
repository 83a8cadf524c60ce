"""Child processes that end with their parent, together with every process that they start.

`python child_process.py PROGRAM …` runs one command under two processes; the script imports the standard library only.
The supervisor starts the command. On Linux it is a child subreaper: a descendant whose parent ends becomes a child of
the supervisor, whatever session or process group it moved to. When the command ends, the supervisor kills all remaining
descendants. The front process is the one that the caller sees; it holds a pipe to the supervisor. When the front
process gets SIGTERM, is killed, or loses its parent, the pipe closes and the supervisor kills the command. The front
process ends after the supervisor, so no process of the command is left when it has ended (if the front process itself
is killed: a moment later).

Standard input and output belong to the command. The last lines of its standard error are written when it fails, with
its exit code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

STDERR_LINES, STDERR_LINE_BYTES = 20, 4096
PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0
"""Time limit for killing descendants; the kernel may hold a process longer."""
DRAIN_SECONDS = 5.0
"""Time limit for reading the rest of standard output after the end of the command."""


class CommandFailed(Exception):
    """The command failed, printed too much, or did not end in time."""


def supervised_command(command: list[str]) -> list[str]:
    """The command line that runs `command` under a supervisor."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *command]


async def run_command(
    command: list[str],
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    timeout: float | None = None,
    max_output: int = 2**20,
) -> bytes:
    """Run a supervised command and return its standard output. Cancellation kills the whole process tree.

    Raises:
        CommandFailed: exit code other than 0 (with the last lines of standard error), more than `max_output` bytes of
            output, or the timeout.
    """
    import asyncio

    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *supervised_command(command), stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=cwd, start_new_session=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    output, stdout = bytearray(), child.stdout

    async def read_output() -> None:
        while part := await stdout.read(2**16):  # to the end: a full pipe would delay the end of the process
            if len(output) <= max_output:
                output.extend(part)
                if len(output) > max_output:
                    child.terminate()

    reader = asyncio.create_task(read_output())
    try:
        async with asyncio.timeout(timeout):
            child.stdin.write(stdin)
            child.stdin.close()
            errors = await child.stderr.read()  # only the supervisor holds this pipe
            await asyncio.wait([reader], timeout=DRAIN_SECONDS)
            await child.wait()
    except TimeoutError:
        raise CommandFailed(f"the command did not end within {timeout:g} s") from None
    finally:
        reader.cancel()
        if child.returncode is None:
            child.terminate()
            await child.wait()
    if len(output) > max_output:
        raise CommandFailed(f"the command printed more than {max_output:,} bytes")
    if child.returncode:
        raise CommandFailed(errors.decode(errors="replace").strip())
    return bytes(output)


# ------------------------------------------------------------------------------------------------ the script


def main() -> None:
    parent = os.getppid()
    reading, writing = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(writing)
        supervise(reading)
    os.close(reading)
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
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def supervise(pipe: int) -> None:
    """Run the command until it ends or the pipe closes, then kill its descendants."""
    os.setsid()  # signals to the process group of the front process do not reach the supervisor
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    lines: deque[bytes] = deque(maxlen=STDERR_LINES)
    cancelled, code = threading.Event(), 127
    try:
        child = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE)
    except OSError as error:
        lines.append(f"{sys.argv[1]}: {error.strerror}".encode())
    else:
        reader = threading.Thread(target=_read_stderr, args=(child, lines), daemon=True)
        reader.start()
        threading.Thread(target=_kill_when_closed, args=(pipe, cancelled, child), daemon=True).start()
        code = _wait(child)
        reader.join(0.1)
    if code and not cancelled.is_set():
        with suppress(OSError):
            os.write(2, b"%s (exit code %d)\n" % (b"".join(lines.copy()).rstrip(), code))
    kill_descendants()
    os._exit(code & 0xFF)


def _read_stderr(child: subprocess.Popen[bytes], lines: deque[bytes]) -> None:
    stderr = child.stderr
    assert stderr is not None
    lines.extend(iter(lambda: stderr.readline(STDERR_LINE_BYTES), b""))


def _kill_when_closed(pipe: int, cancelled: threading.Event, child: subprocess.Popen[bytes]) -> None:
    os.read(pipe, 1)
    cancelled.set()
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Exit code of the command; adopted descendants are reaped meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


def kill_descendants() -> None:
    """Kill all descendants of this process, repeatedly: one may start another before it is killed."""
    deadline, other_users = time.monotonic() + KILL_SECONDS, set[int]()
    if not os.path.isdir("/proc/self"):
        os.killpg(0, signal.SIGKILL)
    while (left := descendants() - other_users) and time.monotonic() < deadline:
        for pid in left:
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
