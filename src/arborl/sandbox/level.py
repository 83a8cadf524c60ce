"""Which isolation works on this machine: found by trying, best first."""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass

from arborl.sandbox.limits import Limits
from arborl.sandbox.process import LEVELS, Level, SandboxError, SandboxProcess

ABOUT: dict[Level, str] = {
    "bubblewrap": "bubblewrap: own file system, processes and network",
    "namespaces": "kernel name spaces: own file system, processes and network",
    "rlimits": "resource limits: one process in a folder of its own",
}
FENCES = {"user": "a user of its own", "cgroup": "a memory cgroup"}


@dataclass(frozen=True, slots=True)
class Found:
    """The level in force."""

    name: Level
    fences: tuple[str, ...]
    """`seccomp`: system calls are filtered. `cgroup`: the kernel bounds the memory of all its processes together, with
    what it holds for them. At the level without a file system also `landlock`: files are fenced; and
    `user`: root's guest is another user, which it stays only where the interpreter is nobody else's to read."""
    better: dict[str, str]
    """Why no better level works here."""

    @property
    def isolates(self) -> bool:
        """Whether foreign code can neither read the user's files nor reach the network."""
        return self.name != "rlimits" or {"seccomp", "landlock"} <= set(self.fences)

    def __str__(self) -> str:
        names = [FENCES.get(fence, fence) for fence in self.fences]
        fenced = f", fenced by {' and '.join(names)}" if names else ""
        fenced += "" if self.isolates else "; NOT ISOLATED: code may do what this user may"
        return f"{ABOUT[self.name]}{fenced}"


_unsafe_allowed = threading.Event()


def allow_unsafe(allowed: bool) -> None:
    """Whether code may run in this process's sandboxes where they isolate nothing; at first it may not."""
    _unsafe_allowed.set() if allowed else _unsafe_allowed.clear()


def unsafe_allowed() -> bool:
    """What `allow_unsafe` was last told; processes that work for this one are to be told the same."""
    return _unsafe_allowed.is_set()


def level_in_force() -> Found:
    """The level that sandboxes of this process have; SandboxError where it isolates nothing and nobody allowed that."""
    found = best_level()
    if not found.isolates and not _unsafe_allowed.is_set():
        reasons = "; ".join(f"{level}: {why}" for level, why in found.better.items())
        raise SandboxError(
            "nothing isolates code here: what a model writes could read and write your files and reach the network "
            f"({reasons}; and no Landlock with seccomp). Install bubblewrap, allow user name spaces, or, on a machine "
            "where nothing is to be lost, write sandbox.allow_unsafe=true (arborl.sandbox.allow_unsafe(True))"
        )
    return found


@functools.lru_cache(maxsize=1)
def best_level() -> Found:
    """The best level that really starts a guest here; raises SandboxError, with every reason, where none does."""
    better: dict[str, str] = {}
    for level in LEVELS:
        try:
            return Found(level, try_level(level), better)
        except SandboxError as error:
            better[level] = str(error)
    raise SandboxError("no sandbox works here. " + " ".join(f"{level}: {why}." for level, why in better.items()))


def try_level(level: Level) -> tuple[str, ...]:
    """Start a guest, have it add, and return its fences; SandboxError says what is missing."""
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}")
    with SandboxProcess(Limits(), level) as box:
        outcome = box.run_sync("1 + 1")
        if outcome.value != "2":
            raise SandboxError(f"a guest at level {level!r} cannot add: {outcome.error or outcome.stderr}")
        return box.fences
