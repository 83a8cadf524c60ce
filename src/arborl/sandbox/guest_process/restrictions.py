"""Restrictions of a sandboxed process: resource limits, user, capabilities, files (Landlock), system calls."""

from __future__ import annotations

import ctypes
import os
import resource

import seccomp_filter

libc = ctypes.CDLL(None, use_errno=True)
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES, DROP_BOUND = 1, 4, 36, 38, 24

OVERFLOW_UID = 65534

# Landlock: bits of access to files
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
CREATE_RULES, ADD_RULE, RESTRICT = 444, 445, 446  # equal on all architectures


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def set_limits(plan: dict) -> None:
    """Set resource limits. The host also checks time, total memory and the number of processes."""
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
    """Become a user without other processes. Root is exempt from the process limit; this user is not."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def choose_user(uid: int, folders: list[str], home: str) -> int:
    """The user of root's guest on root's file system, with `home` as its folder: `uid`, or `OVERFLOW_UID` in a
    container without that id; 0 if neither can read `folders`."""
    for candidate in (uid, OVERFLOW_UID):
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
    for capability in range(64):
        if libc.prctl(DROP_BOUND, ctypes.c_ulong(capability), 0, 0, 0):
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def landlock_version() -> int:
    """0 without Landlock."""
    return max(libc.syscall(CREATE_RULES, None, 0, 1), 0)


class LandlockRules(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class LandlockPathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Allow only these paths: `readable` to read and execute, `writable` for everything. Needs `no_new_privs`."""
    version = landlock_version()
    everything = ALL_BY_VERSION[min(version, 5)]
    rules = LandlockRules(everything, 0, 3 if version >= 6 else 0)  # 3: no signals and abstract sockets to the outside
    ruleset = libc.syscall(CREATE_RULES, ctypes.byref(rules), 24 if version >= 6 else 8, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    read = EXECUTE | READ_FILE | READ_FOLDER
    for path, access in [*((path, read) for path in readable), *((path, everything) for path in writable)]:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            access &= EXECUTE | READ_FILE | WRITE_FILE | (TRUNCATE & everything)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = LandlockPathRule(access, descriptor)
        if libc.syscall(ADD_RULE, ruleset, 1, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), f"landlock: {path}")
        os.close(descriptor)
    if libc.syscall(RESTRICT, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock")
    os.close(ruleset)


def apply_final(plan: dict) -> list[str]:
    """The last, irrevocable restrictions. Returns the names of those in force."""
    prctl(SET_NO_NEW_PRIVILEGES, 1)
    alone = plan["level"] == "rlimits"
    applied = list(plan.get("restrictions", ()))
    if alone and landlock_version():
        restrict_files([*plan["readable"], "/dev/urandom"], [plan["home"], "/dev/null"])
        applied.append("landlock")
    if seccomp_filter.supported():
        seccomp_filter.install(libc, alone)
        applied.append("seccomp")
    return applied
