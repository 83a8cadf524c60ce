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
}
# Without a process name space of its own a guest could reach its parent: it then signals, forks and reschedules nobody.
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
}
CLONE, CLONE3, PRLIMIT = (56, 220), (435, 435), (302, 261)
NEW_NAMESPACES = 0x7E020080
THREAD = 0x00010000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

Line = tuple[int, int, int, int]
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NOT_PERMITTED, NO_SUCH_CALL = 1, 38
FIRST_ARGUMENT = 16


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
    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    lines += [(AT_LEAST, 0, 1, 0x40000000), refuse]  # the 32-bit twins of x86_64's calls
    for numbers in {**DENIED, **(ALONE if alone else {})}.values():
        if (number := numbers[column]) is not None:
            lines += [(EQUAL, 0, 1, number), refuse]
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
