"""What a guest gives up before it runs a line of foreign code: rights, resources, files, system calls."""

from __future__ import annotations

import ctypes
import os
import resource

import calls

libc = ctypes.CDLL(None, use_errno=True)
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES, DROP_BOUND = 1, 4, 36, 38, 24

NOBODY = 65534

# Landlock: bits of access to files
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
CREATE_RULES, ADD_RULE, RESTRICT = 444, 445, 446  # the same numbers on every machine


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def limit(plan: dict) -> None:
    """Resource limits. The host watches time, total memory and the number of processes besides."""
    for name, value in (
        ("AS", plan["memory"]),
        ("FSIZE", plan["file"]),
        ("NOFILE", plan["open_files"]),
        ("NPROC", plan["processes"] + 2),
        ("CORE", 0),
        ("MSGQUEUE", 0),
        ("MEMLOCK", 0),
    ):
        which = getattr(resource, f"RLIMIT_{name}", None)
        if which is None:
            continue
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    os.nice(plan["nice"])


def drop_user(uid: int) -> None:
    """Become somebody nobody else is. Root is exempt from the limit on processes; this number is not."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def other_user(uid: int, folders: list[str], home: str) -> int:
    """The user that root's guest becomes where it shares root's file system, with `home` made its own: `uid`, or nobody
    where a container has no such number; 0 where neither could read `folders`, such as an interpreter in a closed home.
    """
    for candidate in (uid, NOBODY):
        os.chown(home, candidate, candidate)
        child = os.fork()
        if child == 0:
            try:
                drop_user(candidate)
                for folder in (*folders, home):
                    os.listdir(folder)
                os._exit(0)
            except OSError:
                os._exit(1)
        if os.waitpid(child, 0)[1] == 0:
            return candidate
    os.chown(home, 0, 0)
    return 0


def drop_capabilities() -> None:
    """All of them, for good: the process keeps its user but no right beyond it."""
    for capability in range(64):
        if libc.prctl(DROP_BOUND, ctypes.c_ulong(capability), 0, 0, 0):
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def landlock_version() -> int:
    """0 where the kernel has none."""
    return max(libc.syscall(CREATE_RULES, None, 0, 1), 0)


class Rules(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def fence_files(readable: list[str], writable: list[str]) -> None:
    """Leave only these paths: `readable` to read and execute, `writable` for everything. Needs `no_new_privs`."""
    version = landlock_version()
    everything = ALL_BY_VERSION[min(version, 5)]
    rules = Rules(everything, 0, 3 if version >= 6 else 0)  # 3: no signals and no abstract sockets out of here
    made = libc.syscall(CREATE_RULES, ctypes.byref(rules), 24 if version >= 6 else 8, 0)
    if made < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    read = EXECUTE | READ_FILE | READ_FOLDER
    for path, access in [*((path, read) for path in readable), *((path, everything) for path in writable)]:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            access &= EXECUTE | READ_FILE | WRITE_FILE | (TRUNCATE & everything)
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = Beneath(access, opened)
        if libc.syscall(ADD_RULE, made, 1, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), f"landlock: {path}")
        os.close(opened)
    if libc.syscall(RESTRICT, made, 0):
        raise OSError(ctypes.get_errno(), "landlock")
    os.close(made)


def seal(plan: dict) -> list[str]:
    """The last step: nothing below can be undone from inside. Returns which fences could be put up."""
    prctl(SET_NO_NEW_PRIVILEGES, 1)
    alone = plan["level"] == "rlimits"
    fences = list(plan.get("fences", ()))
    if alone and landlock_version():
        fence_files([*plan["readable"], "/dev/urandom"], [plan["home"], "/dev/null"])
        fences.append("landlock")
    if calls.supported():
        calls.install(libc, alone)
        fences.append("seccomp")
    return fences
