"""The memory cgroup and the folder of a sandboxed process.

Cgroup version 1: a group below the host's. Version 2 allows no limits below a group with processes; there the group is
a sibling of the host's, in a group that systemd has delegated (`Delegate=yes` with `DelegateSubgroup=`).
"""

from __future__ import annotations

import os
import time

MOUNT = "/sys/fs/cgroup"
MEMORY_OVERHEAD = 64 * 2**20  # bytes for the interpreter's pages, page tables and kernel structures

START_SECONDS = 60  # A group of this age without processes belongs to a guest that has ended


def make_cgroup(name: str, limit: int, mount: str = MOUNT, own: str = "/proc/self/cgroup") -> str:
    """Folder of a new group with this limit in bytes; empty if it cannot be created."""
    folder = ""
    try:
        parent = _parent(mount, own)
        if not parent:
            return ""
        remove_old_cgroups(parent, name.rpartition("-")[0])
        folder = f"{parent}/{name}"
        os.mkdir(folder)
        version2 = os.path.exists(f"{folder}/memory.max")
        _write(f"{folder}/memory.max" if version2 else f"{folder}/memory.limit_in_bytes", limit)
        swap = f"{folder}/memory.swap.max" if version2 else f"{folder}/memory.memsw.limit_in_bytes"
        if os.path.exists(swap):
            _write(swap, 0 if version2 else limit)
        return folder
    except OSError:
        remove_cgroup(folder)
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


def remove_old_cgroups(parent: str, prefix: str) -> None:
    """Remove groups of killed supervisors. A group with processes cannot be removed."""
    with os.scandir(parent) as entries:
        for group in entries:
            if group.name.startswith(f"{prefix}-") and time.time() - group.stat().st_mtime > START_SECONDS:
                remove_cgroup(group.path)


def open_cgroup(folder: str) -> int:
    return os.open(f"{folder}/cgroup.procs", os.O_WRONLY)


def is_out_of_memory(folder: str) -> bool:
    for name in ("memory.events", "memory.oom_control"):
        try:
            with open(f"{folder}/{name}") as file:
                return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in file)
        except OSError:
            continue
    return False


def remove_cgroup(folder: str) -> None:
    try:
        if folder:
            os.rmdir(folder)
    except OSError:
        pass


def _write(path: str, value: int) -> None:
    with open(path, "w") as file:
        file.write(str(value))


OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_folder(folder: str) -> None:
    """Remove the folder of a guest without a separate file system. It walks by descriptor, one open at a time, without
    long paths or recursion, so any depth works. Errors are ignored."""
    try:
        os.rmdir(folder)  # usually empty
        return
    except FileNotFoundError:
        return
    except OSError:
        pass
    parents: list[tuple[str, list[str]]] = []
    """Name of each folder on the path, and the remaining entries of its parent."""
    try:
        os.chmod(folder, 0o700)
        here = os.open(folder, OPEN_FOLDER)
        names = os.listdir(here)
        while names or parents:
            if not names:
                here, (name, names) = _enter("..", here), parents.pop()
                os.rmdir(name, dir_fd=here)
            elif not _unlink_file(name := names.pop(), here):
                parents.append((name, names))
                os.chmod(name, 0o700, dir_fd=here)  # it may be unreadable
                here = _enter(name, here)
                names = os.listdir(here)
        os.close(here)
        os.rmdir(folder)
    except OSError:
        pass


def _unlink_file(name: str, here: int) -> bool:
    try:
        os.unlink(name, dir_fd=here)
    except IsADirectoryError:
        return False
    return True


def _enter(name: str, here: int) -> int:
    there = os.open(name, OPEN_FOLDER, dir_fd=here)
    os.close(here)
    return there
