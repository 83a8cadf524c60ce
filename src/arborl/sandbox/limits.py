"""What a guest may use, and what became of a piece of code."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Stopped = Literal["", "wall", "cpu", "children", "memory", "processes", "disk", "output", "forged", "died"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one piece of code may use; times are for one `run`, the rest for all that the guest started.

    Between two runs a guest and all it started stand still.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 5.0
    """Of all its processes together."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all together. Files in the guest's folder come on top."""
    file_mb: int = 16
    """Size of any one file."""
    disk_mb: int = 64
    """All files together."""
    processes: int = 32
    """Processes and threads. Where only resource limits are in force (`rlimits`) there are threads alone."""
    output_bytes: int = 100_000
    """Standard output and error together; the code that writes more is ended."""
    open_files: int = 128

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise ValueError(f"{each.name}={getattr(self, each.name)}: give more than 0")
        if self.memory_mb < 32:
            raise ValueError(f"memory_mb={self.memory_mb}: Python itself needs 32")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a piece of code."""

    ok: bool
    """It ran to its end without an exception."""
    stdout: str = ""
    stderr: str = ""
    """Including the traceback, where there is one."""
    value: str = ""
    """`repr` of the last line, where that is an expression with a value."""
    error: str = ""
    """One line: the exception, or which limit was passed."""
    stopped: Stopped = ""
    """Which limit ended the guest; `forged` when code wrote answers in its place, `died` when it ended by itself. Its
    variables and files are gone then."""
    seconds: float = 0.0

    @property
    def output(self) -> str:
        """As a person at a prompt would see it: what was printed, the value, and what went wrong."""
        parts = (self.stdout.rstrip("\n"), self.value, (self.stderr.rstrip("\n") or self.error) if not self.ok else "")
        text = "\n".join(part for part in parts if part)
        return f"{text}\n{self.error}" if self.stopped and self.error not in text else text
