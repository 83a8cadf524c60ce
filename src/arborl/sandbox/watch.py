"""How much a tree of processes uses, read from /proc, which no one process's limits can say; and how it is stopped."""

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
PIPE_BYTES = 16 * PAGE
"""What a pipe holds; no guest can make one larger."""
STILL = "TtZXx"
"""States of processes that do nothing: stopped, or dead."""
FREEZE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all descendants of one process."""

    processes: int = 0
    memory: int = 0
    """Bytes in memory; what several processes share counts once for each."""
    cpu: float = 0.0
    """Seconds, with those of children that have been waited for."""
    uncounted: bool = False
    """Somebody ignores the ends of its children: those are waited for by nobody, and their time is in no sum."""


def usage(pid: int) -> Usage:
    """What the descendants of `pid` use now. Those that end while it looks count as far as it got."""
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
    return Usage(processes, memory, ticks / TICKS, uncounted)


class Meter:
    """What the descendants of a process use, with processor time that never falls: what was seen stays counted, also
    where a process ends unwaited for."""

    def __init__(self, pid: int):
        self._pid, self._last, self._lost = pid, 0.0, 0.0

    def read(self) -> Usage:
        now = usage(self._pid)
        if now.cpu < self._last:  # a child may have been waited for between the look at its parent and that at it
            now = usage(self._pid)
        self._lost += max(self._last - now.cpu, 0.0)
        self._last = now.cpu
        return replace(now, cpu=now.cpu + self._lost)


def shared_out(pid: int) -> int:
    """Bytes in memory of all descendants, what is shared counted once: exact, and far slower than `usage`."""
    total = 0
    for child in descendants(pid):
        try:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        except PermissionError:
            return usage(pid).memory
        except (OSError, StopIteration):
            continue
    return total


def buffers(pid: int, open_files: int) -> int:
    """The most that the sockets and pipes of all descendants can hold in the kernel, which no process's memory shows.

    A process whose descriptors cannot be looked at counts for `open_files` sockets: it may hide them.
    """
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
    """What can wait to be read from one socket; the kernel lets one message pass beyond its limit."""
    try:
        return int(Path("/proc/sys/net/core/wmem_default").read_text()) + 2**15
    except (OSError, ValueError):
        return 2**18


def descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on."""
    waiting = children(pid)
    while waiting:
        child = waiting.pop()
        waiting += children(child)
        yield child


def children(pid: int) -> list[int]:
    """Direct children; those that any of its threads started."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:
        pass
    return found


def freeze(pid: int) -> bool:
    """Stop every descendant; True once they all stand still. One pass is not enough: a process that was not yet stopped
    may have started another. Nothing inside can wake them (`inside/calls.py` refuses what could).

    One that waits in the kernel (D: for a disk, or in `vfork` for its child) and has been told will stop before it does
    anything else.
    """
    deadline, told = time.perf_counter() + FREEZE_SECONDS, set[int]()
    while True:
        states = {child: state(child) for child in descendants(pid)}
        moving = [child for child, now in states.items() if now not in STILL and not (now == "D" and child in told)]
        if not moving:
            return True
        if time.perf_counter() > deadline:
            return False
        signal_all(moving, signal.SIGSTOP)
        told |= set(moving)


def thaw(pid: int) -> None:
    """Let every descendant go on."""
    signal_all(descendants(pid), signal.SIGCONT)


def signal_all(pids: Iterable[int], which: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, which)
        except (ProcessLookupError, PermissionError):  # gone; or not this user's, which the next look will show
            continue


def state(pid: int) -> str:
    """The letter the kernel gives it; that of a dead one where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def size(folder: str, pid: int, most: int, largest: int) -> int:
    """Bytes on disk below `folder`, and of files that descendants of `pid` have removed and still hold.

    Every entry counts as a block at least. The look ends beyond `most`, and what cannot be looked at (a closed folder,
    folders in folders without end) counts as more: whoever hides files has none to spare.

    Args:
        largest: the most that one file may have.
    """
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
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:
            return most + 1
    return total + sum(unlinked(child, folder, largest) for child in descendants(pid))


def unlinked(pid: int, folder: str, largest: int) -> int:
    """Bytes of files that a process holds open or mapped and that no folder holds any more. The size of one that is
    only mapped cannot be seen: it counts as the largest that there may be."""
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
