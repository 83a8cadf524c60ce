"""The sandbox: the best isolation level of this machine, and a Python process at that level."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arborl.sandbox.sandbox_process import LEVELS, Level, SandboxError, SandboxProcess
from arborl.sandbox.sandbox_protocol import SandboxLimits

LEVEL_TEXT: dict[Level, str] = {
    "bubblewrap": "bubblewrap: separate file system, processes and network",
    "namespaces": "kernel name spaces: separate file system, processes and network",
    "rlimits": "resource limits: one process in its own folder",
}
RESTRICTION_TEXT = {"user": "a separate user", "cgroup": "a memory cgroup"}


@dataclass(frozen=True, slots=True)
class ActiveLevel:
    """Isolation level of this machine's sandboxes."""

    name: Level
    restrictions: tuple[str, ...]
    """`seccomp`: filtered system calls. `cgroup`: the kernel limits the memory of all processes together. At the level
    `rlimits` also `landlock`: restricted files; and `user`: root's code runs as another user."""
    unavailable: dict[str, str]  # better level -> why it does not work

    @property
    def is_isolated(self) -> bool:
        """Whether code can neither read the user's files nor reach the network."""
        return self.name != "rlimits" or {"seccomp", "landlock"} <= set(self.restrictions)

    def __str__(self) -> str:
        names = [RESTRICTION_TEXT.get(name, name) for name in self.restrictions]
        text = f", restricted by {' and '.join(names)}" if names else ""
        text += "" if self.is_isolated else "; NOT ISOLATED: code has the rights of this user"
        return f"{LEVEL_TEXT[self.name]}{text}"


_unsafe_allowed = threading.Event()


def allow_unsafe(allowed: bool) -> None:
    """Allow or forbid code in sandboxes without isolation; forbidden by default."""
    _unsafe_allowed.set() if allowed else _unsafe_allowed.clear()


def unsafe_allowed() -> bool:
    """The value of `allow_unsafe`; worker processes must get the same."""
    return _unsafe_allowed.is_set()


def active_level() -> ActiveLevel:
    """Isolation level of this process's sandboxes; SandboxError without isolation unless `allow_unsafe`."""
    found = best_level()
    if not found.is_isolated and not _unsafe_allowed.is_set():
        reasons = "; ".join(f"{level}: {why}" for level, why in found.unavailable.items())
        raise SandboxError(
            "no isolation works on this machine: code of a model could read and write your files and reach the network "
            f"({reasons}; and no Landlock with seccomp). Install bubblewrap, allow user name spaces, or, on a machine "
            "without valuable data, write sandbox.allow_unsafe=true (arborl.sandbox.allow_unsafe(True))"
        )
    return found


@functools.lru_cache(maxsize=1)
def best_level() -> ActiveLevel:
    """The best level that starts a sandbox on this machine; SandboxError with all reasons if none does."""
    unavailable: dict[str, str] = {}
    for level in LEVELS:
        try:
            return ActiveLevel(level, try_level(level), unavailable)
        except SandboxError as error:
            unavailable[level] = str(error)
    raise SandboxError(
        "no sandbox works on this machine. " + " ".join(f"{level}: {why}." for level, why in unavailable.items())
    )


def try_level(level: Level) -> tuple[str, ...]:
    """Start a sandbox, run a test, and return its restrictions; SandboxError if it fails."""
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}")
    with SandboxProcess(SandboxLimits(), level) as sandbox:
        result = sandbox.run_sync("1 + 1")
        if result.value != "2":
            raise SandboxError(f"the test at level {level!r} failed: {result.error or result.stderr}")
        return sandbox.restrictions


class Sandbox(SandboxProcess):
    """An isolated Python process; variables persist between runs, until `close`.

    Example:
        with Sandbox() as sandbox:
            sandbox.run_sync("x = 6")
            sandbox.run_sync("x * 7").value          # '42'
            sandbox.run_sync("while True: pass")     # SandboxResult(ok=False, stopped='cpu', …); the process has ended

    Args:
        limits: resource limits.
        level: isolation level; by default the best that works (`arborl.sandbox.best_level`), and SandboxError if that
            does not isolate.
        packages: folders with Python packages for the code; they must be readable by all users.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, level: Level | None = None, packages: Sequence[str | Path] = ()
    ):
        super().__init__(limits, level or active_level().name, packages)
