"""The filter of system calls: an allow-list of what Python and its libraries need.

Other calls fail with EPERM. From number 424 on (Linux 5.1 and later) they fail with ENOSYS, because programs that use
such calls fall back to older ones.
"""

from __future__ import annotations

import ctypes
import os
import struct

Numbers = tuple[int | None, int | None]  # call number on (x86_64, aarch64); None if it does not exist

# fmt: off
ALLOWED: dict[str, Numbers] = {
    # files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "open": (2, None), "openat": (257, 56), "creat": (85, None), "close": (3, 57), "close_range": (436, 436),
    "lseek": (8, 62), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "getdents": (78, None),
    "getdents64": (217, 61), "umask": (95, 166), "ftruncate": (77, 46), "fallocate": (285, 47),
    "fadvise64": (221, 223), "fsync": (74, 82), "fdatasync": (75, 83), "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    # descriptors
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd": (284, None), "eventfd2": (290, 19), "signalfd": (282, None), "signalfd4": (289, 74),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "recvfrom": (45, 207),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    # memory
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "msync": (26, 227), "membarrier": (324, 283), "get_mempolicy": (239, 236),
    # time
    "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "times": (100, 153), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102), "getrusage": (98, 165),
    # the process itself
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168), "getrandom": (318, 278), "capget": (125, 90),
    "arch_prctl": (158, None), "exit": (60, 93), "exit_group": (231, 94), "set_tid_address": (218, 96),
    "set_robust_list": (273, 99), "rseq": (334, 293), "futex": (202, 98), "sched_yield": (24, 124),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "wait4": (61, 260),
    "waitid": (247, 95),
    # its signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "restart_syscall": (219, 128),
}
# Only with name spaces: otherwise a guest could reach other processes, and metadata of foreign files, which Landlock
# does not cover.
WITH_NAMESPACES: dict[str, Numbers] = {
    # processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "setpgid": (109, 154), "setsid": (112, 157),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "ioprio_get": (252, 31), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_getattr": (315, 275), "sched_rr_get_interval": (148, 127),
    # metadata of files
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mknod": (133, None), "mknodat": (259, 33), "truncate": (76, 45),
}
READ_ATTRIBUTES: dict[str, Numbers] = {
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13),
}
"""Without name spaces they fail with EOPNOTSUPP, which `shutil` accepts."""
OF_A_PROCESS: dict[str, Numbers] = {
    "getpgid": (121, 155), "getsid": (124, 156), "sched_getaffinity": (204, 123), "sched_getscheduler": (145, 120),
    "sched_getparam": (143, 121),
}
"""The first argument is a process id; without name spaces it must be the guest's or 0."""
CHECKED: dict[str, Numbers] = {
    "getpriority": (140, 141), "prlimit64": (302, 261), "fcntl": (72, 25), "flock": (73, 32), "ioctl": (16, 29),
    "prctl": (157, 167), "mmap": (9, 222), "socketpair": (53, 199), "sendto": (44, 206), "clone": (56, 220),
}
"""Allowed with certain arguments: see `_argument_checks`."""

FCNTL = (0, 1, 2, 3, 4, 5, 36, 1030, 1032, 1034)
"""DUPFD, GETFD, SETFD, GETFL, SETFL, GETLK, OFD_GETLK, DUPFD_CLOEXEC, GETPIPE_SZ, GET_SEALS: no signals, leases,
watches or larger pipes."""
LOCKS = (6, 7, 37, 38)
"""SETLK, SETLKW, OFD_SETLK, OFD_SETLKW: they report success without locking. A lock on a system file would block the
host; SQLite needs the success."""
IOCTL = (
    0x5401, 0x5402, 0x5403, 0x5404, 0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D,  # TCGETS, TCSETS…, TCGETS2, …
    0x540E, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414,  # TIOCSCTTY, TIOCGPGRP, TIOCSPGRP, TIOCOUTQ, TIOC[GS]WINSZ
    0x541B, 0x5421, 0x5450, 0x5451, 0x80045430, 0x40045431, 0x5441,  # FIONREAD, FIONBIO, FIO[N]CLEX, pseudo-terminals
)
PRCTL = (2, 3, 15, 16, 21, 23, 27, 38, 39, 0x53564D41)
"""GET_PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, GET_SECCOMP, CAPBSET_READ, GET_SECUREBITS, [SG]ET_NO_NEW_PRIVS,
SET_VMA."""
# fmt: on
NEW_NAMESPACES, THREAD, SHARED_DESCRIPTORS = 0x7E020080, 0x00010000, 0x00000400
SHARED, ANONYMOUS = 0x01, 0x20
UNIX, NOT_STREAM = 1, 0x0E
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
FIRST_WITH_FALLBACK = 424

BpfInstruction = tuple[int, int, int, int]
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NOT_PERMITTED, NOT_A_TERMINAL, NO_SUCH_CALL, NOT_SUPPORTED = 1, 25, 38, 95
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16

PERMIT: BpfInstruction = (RETURN, 0, 0, ALLOW)
DENY: BpfInstruction = (RETURN, 0, 0, ERROR | NOT_PERMITTED)
PRETEND_SUCCESS: BpfInstruction = (RETURN, 0, 0, ERROR)  # error 0: the caller sees success, the kernel does nothing


def supported() -> bool:
    return os.uname().machine in MACHINES


def filter_program(alone: bool, pid: int) -> list[BpfInstruction]:
    """The filter as BPF instructions `(code, jump if true, jump if false, k)`."""
    column, architecture = MACHINES[os.uname().machine]
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    code += [(AT_LEAST, 0, 1, 0x40000000), DENY]  # x32 calls
    plain = ALLOWED if alone else {**ALLOWED, **WITH_NAMESPACES, **READ_ATTRIBUTES, **OF_A_PROCESS}
    for numbers in plain.values():
        code += _if_equal(numbers[column], [PERMIT])
    for name, block in _argument_checks(alone, pid).items():
        code += _if_equal(CHECKED[name][column], block)
    if alone:
        for numbers in READ_ATTRIBUTES.values():
            code += _if_equal(numbers[column], [(RETURN, 0, 0, ERROR | NOT_SUPPORTED)])
        for numbers in OF_A_PROCESS.values():
            code += _if_equal(numbers[column], _one_of(0, (0, pid), DENY))
    return [*code, (AT_LEAST, 0, 1, FIRST_WITH_FALLBACK), (RETURN, 0, 0, ERROR | NO_SUCH_CALL), DENY]


def _argument_checks(alone: bool, pid: int) -> dict[str, list[BpfInstruction]]:
    """Argument checks of the calls in `CHECKED`. `clone3` has its flags in memory, which a filter cannot read; it is
    not allowed, and the C library falls back to `clone`. Threads must share their descriptors: separate tables are not
    listed in /proc. Socket pairs must be streams, which cannot send to another address. `sendmsg` is not allowed:
    descriptors in transit are not listed in /proc."""
    own_process = [_load(0), (EQUAL, 1, 0, 0), DENY, *_one_of(1, (0, pid), DENY)] if alone else [PERMIT]
    thread = [(ANY_BIT, 0, 1, SHARED_DESCRIPTORS), PERMIT, DENY]
    return {
        "getpriority": own_process,
        "prlimit64": _one_of(0, (0, pid) if alone else (0,), DENY),
        "fcntl": [*_one_of(1, FCNTL), *(line for lock in LOCKS for line in _if_equal(lock, [PRETEND_SUCCESS])), DENY],
        "flock": [PRETEND_SUCCESS],
        "ioctl": _one_of(1, IOCTL, (RETURN, 0, 0, ERROR | NOT_A_TERMINAL)),
        "prctl": _one_of(0, PRCTL, DENY),
        # Shared anonymous memory stays allocated while any page is mapped, but only mapped pages are counted.
        "mmap": [_load(3), (ANY_BIT, 1, 0, ANONYMOUS), PERMIT, (ANY_BIT, 0, 1, SHARED), DENY, PERMIT],
        "socketpair": [_load(0), (EQUAL, 1, 0, UNIX), DENY, _load(1), (ANY_BIT, 0, 1, NOT_STREAM), DENY, PERMIT],
        "sendto": [_load(4), (EQUAL, 1, 0, 0), DENY, _load(4, 4), (EQUAL, 1, 0, 0), DENY, PERMIT],
        "clone": [
            _load(0), (ANY_BIT, 0, 1, NEW_NAMESPACES), DENY,
            (ANY_BIT, 0, len(thread), THREAD), *thread, DENY if alone else PERMIT,
        ],
    }  # fmt: skip


def _load(argument: int, half: int = 0) -> BpfInstruction:
    """Load the lower half of an argument; with `half=4` the upper."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * argument + half)


def _if_equal(value: int | None, block: list[BpfInstruction]) -> list[BpfInstruction]:
    """`block`, which ends with a return, if the loaded value equals `value`."""
    return [] if value is None else [(EQUAL, 0, len(block), value), *block]


def _one_of(argument: int, values: tuple[int, ...], otherwise: BpfInstruction | None = None) -> list[BpfInstruction]:
    code = [_load(argument), *(line for value in values for line in _if_equal(value, [PERMIT]))]
    return code if otherwise is None else [*code, otherwise]


class BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_void_p))


def install(libc: ctypes.CDLL, alone: bool) -> None:
    """Install the filter, irrevocably, for this process and its descendants. Needs `no_new_privs`."""
    code = filter_program(alone, os.getpid())
    packed = b"".join(struct.pack("<HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    whole = BpfProgram(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    if libc.prctl(22, 2, ctypes.byref(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
