"""Python in the sandbox."""

from __future__ import annotations

from arborl.sandbox import Sandbox, SandboxLimits, SandboxPool, SandboxResult, shared_pool
from arborl.tools.core.tool import Tool, tool
from arborl.tools.core.tool_context import ToolContext

LIMITS = SandboxLimits(wall_seconds=10, cpu_seconds=5)


class PythonSession:
    """The interpreter of one episode: leased at the first call, ended with the episode."""

    def __init__(self, pool: SandboxPool | None = None):
        self.pool = pool or shared_pool(LIMITS)
        self._sandbox: Sandbox | None = None

    async def run(self, code: str) -> SandboxResult:
        """Run code; variables persist. After a limit was exceeded, the next call has a new interpreter."""
        if self._sandbox is not None and not self._sandbox.alive:
            await self.close()
        if self._sandbox is None:
            self._sandbox = await self.pool.acquire()
        async with self.pool.runs:
            return await self._sandbox.run(code)

    async def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self.pool.release(sandbox)


class Python(Tool):
    """Run Python code in the sandbox; variables persist during the episode.

    Example:
        Python(wall_seconds=2, memory_mb=256)

    Args:
        wall_seconds: time limit of one call.
        cpu_seconds: processor time of all processes of one call.
        memory_mb: address space of each process, and resident memory of all processes.
        file_mb: maximum size of a file.
        disk_mb: maximum size of all files.
        processes: maximum number of processes and threads.
        output_bytes: maximum bytes of standard output and error.
        open_files: maximum number of open files.
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
        self.limits = SandboxLimits(
            wall_seconds, cpu_seconds, memory_mb, file_mb, disk_mb, processes, output_bytes, open_files
        )
        super().__init__(self.python, stateful=True, timeout=max(60.0, 2 * wall_seconds))
        self.sandboxed = True

    async def python(self, code: str, context: ToolContext) -> str:
        """Run Python code and read what it prints, and the value of its last line. Variables last from call to call.

        Args:
            code: for example: x = 6; print(x * 7)
        """
        session: PythonSession = context.state(self.limits, lambda: PythonSession(shared_pool(self.limits)))
        result = await session.run(code)
        lost = "\nVariables are lost; the next call begins anew." if result.stopped else ""
        return result_text(result) + lost


python = Python()


@tool(name="python", timeout=60)
async def python_once(code: str) -> str:
    """Run a Python program and read what it prints, and the value of its last line. Every call begins anew.

    Args:
        code: for example: x = 6; print(x * 7)
    """
    return result_text(await shared_pool(LIMITS).run(code))


python_once.sandboxed = True


def result_text(result: SandboxResult) -> str:
    """Text for the model. Failed code is a successful tool call."""
    return result.output or ("(no output)" if result.ok else result.error)
