"""The sandbox: a Python process that can reach nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from arborl.sandbox.level import level_in_force
from arborl.sandbox.limits import Limits
from arborl.sandbox.process import Level, SandboxProcess


class Sandbox(SandboxProcess):
    """A Python process that can reach nothing: its variables last from one `run` to the next, until `close`.

    Example:
        with Sandbox() as box:
            box.run_sync("x = 6")
            box.run_sync("x * 7").value          # '42'
            box.run_sync("while True: pass")     # Outcome(ok=False, stopped='cpu', …); the guest is gone

    Args:
        limits: what it may use.
        level: how it is isolated; by default the best that works here (`arborl.sandbox.best_level`), and SandboxError
            where that isolates nothing. One that is named is taken as it is.
        packages: folders with Python packages that it may import. Everybody must be allowed to read them: the guest is
            another user.
    """

    def __init__(self, limits: Limits | None = None, level: Level | None = None, packages: Sequence[str | Path] = ()):
        super().__init__(limits, level or level_in_force().name, packages)
