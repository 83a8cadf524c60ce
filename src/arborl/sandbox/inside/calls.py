"""A filter of system calls: what a guest may not ask of the kernel, whatever its name spaces are."""

from __future__ import annotations

import ctypes
import os
import struct

# name: (x86_64, aarch64); None where the machine has no such call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),  # a pair of connected ones can still be made, and reaches nobody
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),  # memory that no limit counts, as the next four
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "timer_create": (222, 107),  # its signal could wake a guest that was stopped
    "reboot": (169, 142),  # of the whole machine, as those that follow: no guest has the right to, and none may ask
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
}
# Without name spaces of its own a guest could reach its parent, and files outside its folder by what Landlock does not
# look at: it then signals, forks and reschedules nobody, and changes nobody's modes, owners, times or attributes.
ALONE: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "fork": (57, None),
    "vfork": (58, None),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "truncate": (76, 45),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
}
CLONE, CLONE3, PRLIMIT = (56, 220), (435, 435), (302, 261)
# (call, argument, its value) that is refused: a signal at a parent's death, which could also be taken off; a signal of
# one's choice from a file; flags of files.
REFUSED_ARGUMENTS = (
    ((157, 167), 0, 1),  # prctl: PR_SET_PDEATHSIG
    ((72, 25), 1, 10),  # fcntl: F_SETSIG
    ((16, 29), 1, 0x40086602),  # ioctl: FS_IOC_SETFLAGS
    ((16, 29), 1, 0x401C5820),  # ioctl: FS_IOC_FSSETXATTR
)
NEW_NAMESPACES = 0x7E020080
THREAD = 0x00010000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

Line = tuple[int, int, int, int]
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NOT_PERMITTED, NO_SUCH_CALL = 1, 38
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16


def supported() -> bool:
    """Whether this machine's call numbers are in the table."""
    return os.uname().machine in MACHINES


def program(alone: bool) -> list[Line]:
    """The filter as instructions `(code, jump if true, jump if false, k)`.

    Args:
        alone: also refuse new processes and signals.
    """
    column, architecture = MACHINES[os.uname().machine]
    refuse = (RETURN, 0, 0, REFUSE | NOT_PERMITTED)
    allow = (RETURN, 0, 0, ALLOW)
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    lines += [(AT_LEAST, 0, 1, 0x40000000), refuse]  # the 32-bit twins of x86_64's calls
    for numbers in {**DENIED, **(ALONE if alone else {})}.values():
        if (number := numbers[column]) is not None:
            lines += [(EQUAL, 0, 1, number), refuse]
    again = (LOAD, 0, 0, NUMBER)
    for numbers, argument, value in REFUSED_ARGUMENTS:
        low = (LOAD, 0, 0, FIRST_ARGUMENT + 8 * argument)
        lines += [(EQUAL, 0, 4, numbers[column]), low, (EQUAL, 0, 1, value), refuse, again]
    # The flags of clone3 lie in memory, where a filter cannot look; without it the C library falls back to clone.
    lines += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | NO_SUCH_CALL)]
    # A limit may be read and set for oneself (0), not for another process.
    lines += [(EQUAL, 0, 4, PRLIMIT[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 0, 1, 0), allow, refuse]
    flags = [(LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, NEW_NAMESPACES), refuse]
    flags += [(ANY_BIT, 1, 0, THREAD), refuse] if alone else []
    return [*lines, (EQUAL, 0, len(flags), CLONE[column]), *flags, allow]


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_void_p))


def install(libc: ctypes.CDLL, alone: bool) -> None:
    """Put the filter on this process and all it starts; it cannot be taken off. Needs `no_new_privs`."""
    lines = program(alone)
    packed = b"".join(struct.pack("<HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    whole = Program(len(lines), ctypes.cast(buffer, ctypes.c_void_p))
    if libc.prctl(22, 2, ctypes.byref(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
