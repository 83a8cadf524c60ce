"""Name spaces: a process tree, a network without interfaces, and a file system of read-only system folders."""

from __future__ import annotations

import ctypes
import os

from restrictions import libc

NEW_MOUNTS, NEW_CGROUP, NEW_NAMES, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
OUTER = NEW_CGROUP | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NETWORK
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXECUTE, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""Device -> replacement. `/dev/full` reads like `/dev/zero` and cannot be mapped as uncounted memory."""


def check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    encoded = (text.encode() for text in (source, target, kind))
    check(libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def unshare_namespaces() -> bool:
    """Create name spaces (processes: for the next child; files: see `mount_root`). Returns whether as root. Root needs
    no user name space, and its guest becomes another user; other users are root in a user name space."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and libc.unshare(OUTER) == 0:
        return True
    check(libc.unshare(OUTER | NEW_USERS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def bind(source: str, target: str) -> None:
    """Mount `source` read-only at `target`. The kernel requires the flags of the source's mount."""
    mount(source, target, "none", BIND | RECURSIVE)
    kept = NO_EXECUTE if os.statvfs(target).f_flag & os.ST_NOEXEC else 0
    mount("none", target, "none", REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept)


def mount_root(root: str, plan: dict, owner: int) -> None:
    check(libc.unshare(NEW_MOUNTS), "unshare")
    mount("none", "/", "none", RECURSIVE | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,mode=0755")
    for path in plan["readable"]:
        expose(path, root + path)
    for path, target in zip(plan["packages"], package_paths(plan), strict=True):
        expose(path, root + target)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name, device in DEVICES.items():
        open(f"{root}/dev/{name}", "w").close()
        mount(f"/dev/{device}", f"{root}/dev/{name}", "none", BIND)
    os.makedirs(root + plan["home"])
    size = f"size={plan['disk']},nr_inodes=16384,mode=0700,uid={owner},gid={owner}"
    mount("tmpfs", root + plan["home"], "tmpfs", NO_SUID | NO_DEVICES, size)
    for name in ("tmp", "dev/shm"):
        if not os.path.lexists(f"{root}/{name}"):  # the interpreter may be under /tmp
            os.symlink(plan["home"], f"{root}/{name}")
    os.mkdir(f"{root}/proc")
    try:  # noqa: SIM105
        mount("proc", f"{root}/proc", "proc", NO_SUID | NO_DEVICES | NO_EXECUTE | READ_ONLY)
    except OSError:
        pass  # containers that mask parts of /proc forbid this; the guest works without it
    os.chdir(root)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    mount("none", "/", "none", REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir(plan["home"])


def package_paths(plan: dict) -> list[str]:
    """Paths of the packages in the guest, without names of the host."""
    return [f"/packages/{number}" for number in range(len(plan["packages"]))]


def expose(path: str, target: str) -> None:
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.mkdir(target)
        bind(path, target)
    else:
        open(target, "w").close()
        bind(path, target)
