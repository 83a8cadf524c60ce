"""Memory, processor time and files of a process tree, read from /proc, and its freezing."""

from __future__ import annotations

import functools
import os
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK, MAX_DEPTH = 4096, 64
CHILD_ENDS = 1 << (signal.SIGCHLD - 1)
PIPE_BYTES = 16 * PAGE  # capacity of a pipe; the system-call filter forbids larger ones
INACTIVE_STATES = "TtZXx"
FREEZE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Usage of all descendants of a process."""

    processes: int = 0
    memory: int = 0  # resident bytes; shared memory counts once per process
    cpu: float = 0.0  # seconds, including reaped children
    uncounted: bool = False  # A process ignores SIGCHLD: the time of its children is not counted


def process_usage(pid: int) -> ProcessUsage:
    processes = memory = ticks = 0
    uncounted = False
    for child in descendants(pid):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            memory += int(Path(f"/proc/{child}/statm").read_text().split()[1]) * PAGE
            uncounted |= int(fields[30]) & CHILD_ENDS != 0
        except (OSError, IndexError):
            continue
        processes += 1
        ticks += sum(map(int, fields[11:15]))
    return ProcessUsage(processes, memory, ticks / TICKS, uncounted)


class UsageMeter:
    """Usage of the descendants of a process. Processor time never decreases: ended processes stay counted."""

    def __init__(self, pid: int):
        self._pid, self._last, self._lost = pid, 0.0, 0.0

    def read(self) -> ProcessUsage:
        now = process_usage(self._pid)
        if now.cpu < self._last:  # a child may have been reaped between the two reads
            now = process_usage(self._pid)
        self._lost += max(self._last - now.cpu, 0.0)
        self._last = now.cpu
        return replace(now, cpu=now.cpu + self._lost)


def proportional_memory(pid: int) -> int:
    """Resident bytes of all descendants with shared memory counted once (PSS); slower than `process_usage`."""
    total = 0
    for child in descendants(pid):
        try:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        except PermissionError:
            return process_usage(pid).memory
        except (OSError, StopIteration):
            continue
    return total


def kernel_buffer_bytes(pid: int, open_files: int) -> int:
    """Maximum kernel memory of the sockets and pipes of all descendants. A process whose descriptors are unreadable
    counts as `open_files` sockets."""
    sockets, pipes, hidden = set[str](), set[str](), 0
    for child in descendants(pid):
        try:
            with os.scandir(f"/proc/{child}/fd") as entries:
                for entry in entries:
                    target = os.readlink(entry.path)
                    if target.startswith("socket:["):
                        sockets.add(target)
                    elif target.startswith("pipe:["):
                        pipes.add(target)
        except PermissionError:
            hidden += open_files
        except OSError:  # it has ended, or closed one
            continue
    return (len(sockets) + hidden) * socket_bytes() + len(pipes) * PIPE_BYTES


@functools.cache
def socket_bytes() -> int:
    """Capacity of a socket; the kernel allows one message beyond its limit."""
    try:
        return int(Path("/proc/sys/net/core/wmem_default").read_text()) + 2**15
    except (OSError, ValueError):
        return 2**18


def descendants(pid: int) -> Iterator[int]:
    waiting = children(pid)
    while waiting:
        child = waiting.pop()
        waiting += children(child)
        yield child


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:
        pass
    return found


def freeze_descendants(pid: int) -> bool:
    """Stop all descendants; True when all are stopped. Repeated, since a running process may start another. The guest
    cannot resume them (`seccomp_filter.py`). A signalled process in uninterruptible sleep (D) stops before it
    continues."""
    deadline, signalled = time.perf_counter() + FREEZE_SECONDS, set[int]()
    while True:
        states = {child: process_state(child) for child in descendants(pid)}
        active = [
            child
            for child, now in states.items()
            if now not in INACTIVE_STATES and not (now == "D" and child in signalled)
        ]
        if not active:
            return True
        if time.perf_counter() > deadline:
            return False
        signal_all(active, signal.SIGSTOP)
        signalled |= set(active)


def resume_descendants(pid: int) -> None:
    signal_all(descendants(pid), signal.SIGCONT)


def signal_all(pids: Iterable[int], which: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, which)
        except (ProcessLookupError, PermissionError):  # ended, or of another user
            continue


def process_state(pid: int) -> str:
    """State letter of /proc; `X` if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def disk_usage(folder: str, pid: int, most: int, largest: int) -> int:
    """Bytes on disk below `folder`, and of deleted files that descendants of `pid` still hold. Every entry counts as at
    least one block. The scan ends beyond `most`; unreadable or too deep folders count as more."""
    total, waiting = 0, [(folder, 0)]
    while waiting and total <= most:
        place, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return most + 1
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    total += max(entry.stat(follow_symlinks=False).st_blocks * 512, BLOCK)
                    if total > most:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError:
            return most + 1
    return total + sum(unlinked_bytes(child, folder, largest) for child in descendants(pid))


def unlinked_bytes(pid: int, folder: str, largest: int) -> int:
    """Bytes of deleted files that a process holds open or mapped. A file that is only mapped counts as `largest`."""
    held: dict[int, int] = {}
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if line.endswith(" (deleted)") and f" {folder}/" in line:
                held[int(line.split(maxsplit=5)[4])] = largest
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            found = os.stat(f"/proc/{pid}/fd/{descriptor}")
            if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                held[found.st_ino] = found.st_blocks * 512
    except OSError:
        pass
    return sum(held.values())
