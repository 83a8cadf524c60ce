"""Python that cannot reach anything: the model's code runs in the sandbox."""

from __future__ import annotations

from arborl.sandbox import Limits, Outcome, Pool, Sandbox, shared_pool
from arborl.tools.injection import Context
from arborl.tools.tool import Tool, tool

LIMITS = Limits(wall_seconds=10, cpu_seconds=5)


class PythonSession:
    """One episode's interpreter: leased at its first call, ended with the episode.

    Args:
        pool: where it is leased; by default the one that this process shares.
    """

    def __init__(self, pool: Pool | None = None):
        self.pool = pool or shared_pool(LIMITS)
        self._box: Sandbox | None = None

    async def run(self, code: str) -> Outcome:
        """Run code after all that was run before. After a limit was passed, the next call begins anew."""
        if self._box is not None and not self._box.alive:
            await self.close()
        if self._box is None:
            self._box = await self.pool.take()
        async with self.pool.turn():
            return await self._box.run(code)

    async def close(self) -> None:
        """Give the interpreter back."""
        box, self._box = self._box, None
        if box is not None:
            await self.pool.give(box)


class Python(Tool):
    """Run Python code in the sandbox; variables last the episode.

    Example:
        Python(wall_seconds=2, memory_mb=256)

    Args:
        wall_seconds: of one call.
        cpu_seconds: of one call, all its processes together.
        memory_mb: address space of each process, and resident memory of all together.
        file_mb: size of any one file.
        disk_mb: all files together.
        processes: processes and threads.
        output_bytes: standard output and error together.
        open_files: at a time.
    """

    def __init__(
        self,
        wall_seconds: float = LIMITS.wall_seconds,
        cpu_seconds: float = LIMITS.cpu_seconds,
        memory_mb: int = LIMITS.memory_mb,
        file_mb: int = LIMITS.file_mb,
        disk_mb: int = LIMITS.disk_mb,
        processes: int = LIMITS.processes,
        output_bytes: int = LIMITS.output_bytes,
        open_files: int = LIMITS.open_files,
    ):
        self.limits = Limits(
            wall_seconds, cpu_seconds, memory_mb, file_mb, disk_mb, processes, output_bytes, open_files
        )
        super().__init__(self.python, stateful=True, timeout=max(60.0, 2 * wall_seconds))
        self.sandboxed = True

    async def python(self, code: str, context: Context) -> str:
        """Run Python code and read what it prints, and the value of its last line. Variables last from call to call.

        Args:
            code: for example: x = 6; print(x * 7)
        """
        session: PythonSession = context.state(self.limits, lambda: PythonSession(shared_pool(self.limits)))
        outcome = await session.run(code)
        lost = "\nVariables are lost; the next call begins anew." if outcome.stopped else ""
        return shown(outcome) + lost


python = Python()


@tool(name="python", timeout=60)
async def python_once(code: str) -> str:
    """Run a Python program and read what it prints, and the value of its last line. Every call begins anew.

    Args:
        code: for example: x = 6; print(x * 7)
    """
    return shown(await shared_pool(LIMITS).run(code))


python_once.sandboxed = True


def shown(outcome: Outcome) -> str:
    """What the model reads. Code that fails is an answer of a tool that worked, so it says so itself."""
    return outcome.output or ("(no output)" if outcome.ok else outcome.error)
