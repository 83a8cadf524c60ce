"""How much a tree of processes uses, read from /proc: what no single process's limits can say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all descendants of one process."""

    processes: int = 0
    memory: int = 0
    """Bytes in memory; what several processes share counts once for each."""
    cpu: float = 0.0
    """Seconds, with those of children that have been waited for."""


def usage(pid: int) -> Usage:
    """What the descendants of `pid` use now. Those that end while it looks count as far as it got."""
    processes = memory = ticks = 0
    for child in descendants(pid):
        try:
            stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            memory += int(Path(f"/proc/{child}/statm").read_text().split()[1]) * PAGE
        except (OSError, IndexError):
            continue
        processes += 1
        ticks += sum(map(int, stat[11:15]))
    return Usage(processes, memory, ticks / TICKS)


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


def size(folder: str) -> int:
    """Bytes of all files below `folder`, as the disk sees them."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total
