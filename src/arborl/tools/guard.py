"""Runs one command and ends its whole process tree: `python guard.py PROGRAM …`. Standard library only.

There are two processes. The keeper starts the command. On Linux it is a child subreaper: a descendant whose parent ends
becomes a child of the keeper, whatever session or process group it moved to. When the command ends, the keeper kills
all descendants that are left. The other process is the one that the caller sees. It holds one end of a pipe to the
keeper. When it receives SIGTERM, is killed, or sees that the caller is gone, the pipe closes, and the keeper kills the
command too. It ends after the keeper, so nothing of the command is left once it has ended, unless it was killed itself;
then the keeper ends a moment later.

Standard input and output are the command's own. Of what the command writes to standard error the last lines are kept,
and written when it ends with an error, with its exit code.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

LINES, LONGEST = 20, 4096
SET_CHILD_SUBREAPER = 36
"""Of prctl(2)."""
LIMIT = 10.0
"""Seconds after which descendants that do not end although they were killed are left: the kernel holds them."""


def main() -> None:
    parent = os.getppid()
    reading, writing = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(writing)
        keep(reading)
    os.close(reading)
    pipe = [writing]

    def release(*_: object) -> None:
        while pipe:
            os.close(pipe.pop())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        release()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, release)
    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(keeper, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def keep(reading: int) -> None:
    """Run the command until it ends or the pipe closes, then end what it started."""
    os.setsid()  # signals to the group of the other process do not reach the keeper
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    said: deque[bytes] = deque(maxlen=LINES)
    released, code = threading.Event(), 127
    try:
        child = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE)
    except OSError as error:
        said.append(f"{sys.argv[1]}: {error.strerror}".encode())
        listening = threading.Thread()
    else:
        listening = threading.Thread(target=listen, args=(child, said), daemon=True)
        listening.start()
        threading.Thread(target=await_release, args=(reading, released, child), daemon=True).start()
        code = wait(child)
        listening.join(0.1)
    if code and not released.is_set():
        with suppress(OSError):
            os.write(2, b"%s (exit code %d)\n" % (b"".join(said.copy()).rstrip(), code))
    end_descendants()
    os._exit(code & 0xFF)


def listen(child: "subprocess.Popen[bytes]", said: "deque[bytes]") -> None:
    assert child.stderr is not None
    said.extend(iter(lambda: child.stderr.readline(LONGEST), b""))  # type: ignore[union-attr]


def await_release(reading: int, released: threading.Event, child: "subprocess.Popen[bytes]") -> None:
    os.read(reading, 1)
    released.set()
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)


def wait(child: "subprocess.Popen[bytes]") -> int:
    """The exit code of the command. Descendants that the keeper adopted are reaped meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


def end_descendants() -> None:
    """Kill all of them, again and again: one may start another before it is killed."""
    until, spared = time.monotonic() + LIMIT, set[int]()
    if not os.path.isdir("/proc/self"):
        os.killpg(0, signal.SIGKILL)
    while (left := descendants() - spared) and time.monotonic() < until:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:  # it runs as another user
                spared.add(pid)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def descendants() -> set[int]:
    """Processes below this one that have not ended."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
    found: set[int] = set()
    more = {os.getpid()}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more}
        found |= more
    return found


if __name__ == "__main__":
    main()
