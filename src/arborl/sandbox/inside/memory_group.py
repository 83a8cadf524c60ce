"""A memory cgroup for one guest, where the host may make one: the kernel then counts what no process's memory shows.

Version 1: a group below the host's own. Version 2 allows no limits below a group that has processes; there the guest's
is a sibling of the host's, in a group that systemd has delegated (`Delegate=yes` with `DelegateSubgroup=`).
"""

from __future__ import annotations

import os
import time

MOUNT = "/sys/fs/cgroup"
SLACK = 64 * 2**20
"""Beyond memory and files: the interpreter's pages, page tables, and what the kernel keeps for each process."""

STARTED_BY = 60
"""Seconds after which a group without processes is one whose guest has ended."""


def make(name: str, limit: int, mount: str = MOUNT, own: str = "/proc/self/cgroup") -> str:
    """The folder of a new group with this limit in bytes; empty where none can be made."""
    folder = ""
    try:
        parent = _parent(mount, own)
        if not parent:
            return ""
        sweep(parent, name.rpartition("-")[0])
        folder = f"{parent}/{name}"
        os.mkdir(folder)
        version2 = os.path.exists(f"{folder}/memory.max")
        _write(f"{folder}/memory.max" if version2 else f"{folder}/memory.limit_in_bytes", limit)
        swap = f"{folder}/memory.swap.max" if version2 else f"{folder}/memory.memsw.limit_in_bytes"
        if os.path.exists(swap):
            _write(swap, 0 if version2 else limit)
        return folder
    except OSError:
        remove(folder)
        return ""


def _parent(mount: str, own: str) -> str:
    with open(own) as file:
        groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            return f"{mount}/memory{path}".rstrip("/")
    above = f"{mount}{os.path.dirname(groups[''])}".rstrip("/")
    try:
        delegated = os.getxattr(above, "user.delegate") == b"1"
        with open(f"{above}/cgroup.subtree_control") as file:
            return above if delegated and "memory" in file.read().split() else ""
    except (OSError, KeyError):
        return ""


def sweep(parent: str, prefix: str) -> None:
    """Remove groups that keepers left when they were killed. One that has processes cannot be removed, and one that has
    none yet is young."""
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(f"{prefix}-") and time.time() - entry.stat().st_mtime > STARTED_BY:
                remove(entry.path)


def entry(folder: str) -> int:
    """A descriptor by which a process enters the group: it writes 0."""
    return os.open(f"{folder}/cgroup.procs", os.O_WRONLY)


def exhausted(folder: str) -> bool:
    """Whether the kernel has ended a process of the group because it passed the limit."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            with open(f"{folder}/{name}") as file:
                return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in file)
        except OSError:
            continue
    return False


def remove(folder: str) -> None:
    """The group of a guest that has ended."""
    try:
        if folder:
            os.rmdir(folder)
    except OSError:
        pass


def _write(path: str, value: int) -> None:
    with open(path, "w") as file:
        file.write(str(value))
