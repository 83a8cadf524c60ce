"""Attacks on the sandbox, as data: what hostile code tries, and what must not come of it; they are in `attacks.toml`.

The code runs after `PRELUDE`. It says `fell(…)` where it got what it was after; what it cannot see itself (files of the
host, signals, connections) is looked at from outside, after every attack alike: see `attack_runner.py`. Names in
capitals are filled in: SECRET (a file that anybody may read), FOLDER (which anybody may write), HOST and VICTIM
(processes), PORT, SOCKET, ABSTRACT and DATAGRAM (that a person listens at), STDLIB (a file of the interpreter).

One that succeeds must do no harm to the machine that shows it: it sets what is set already.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PRELUDE = """
import ctypes, os, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def fell(what=""): os.write(1, f"FELL {what}\\n".encode())
def can(function, *args, **more):
    try: function(*args, **more)
    except BaseException: return False
    return True
def errno(name, *args):
    ctypes.set_errno(0)
    return 0 if getattr(libc, name)(*args) >= 0 else ctypes.get_errno()
# system calls of x86-64 that have other numbers on 64-bit Arm
ON_ARM = {169: 142, 175: 105, 248: 217, 250: 219, 298: 241, 313: 273, 321: 280, 323: 282}
def call(number, *args):
    ctypes.set_errno(0)
    number = ON_ARM.get(number, number) if os.uname().machine == 'aarch64' else number
    return 0 if libc.syscall(number, *args) >= 0 else ctypes.get_errno()
def token(): return next(f.f_locals["request"]["token"] for f in frames() if "request" in f.f_locals)
def frames():
    f = sys._getframe()
    while f:
        yield f
        f = f.f_back
def answer(token, *texts, kind=0):
    body = token + bytes([kind]) + b"".join(struct.pack("<I", len(t)) + t for t in texts)
    return struct.pack("<I", len(body)) + body
"""


@dataclass(frozen=True)
class Attack:
    area: str
    name: str
    must_not: str
    """What must not happen, in words."""
    code: str
    then: str = ""
    """Run half a second later, in the same sandbox process."""
    open_at: tuple[str, ...] = ()
    """Levels at which it is known to succeed, as docs/security.md says."""
    limits: dict[str, Any] = field(default_factory=dict)
    """Other limits than the usual ones."""


ATTACKS = [Attack(**row) for row in tomllib.loads((Path(__file__).parent / "attacks.toml").read_text())["attack"]]
