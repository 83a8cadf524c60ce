"""Python that cannot reach anything: the model's code runs in the sandbox."""

from __future__ import annotations

from typing import Annotated

from arborl.sandbox import Limits, Outcome, Pool, Sandbox, shared_pool
from arborl.tools.injection import State
from arborl.tools.tool import tool

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


@tool(stateful=True, timeout=60)
async def python(code: str, session: Annotated[PythonSession, State(PythonSession)]) -> str:
    """Run Python code and read what it prints, and the value of its last line. Variables last from call to call.

    Args:
        code: for example: x = 6; print(x * 7)
    """
    outcome = await session.run(code)
    lost = "\nVariables are lost; the next call begins anew." if outcome.stopped else ""
    return shown(outcome) + lost


@tool(name="python", timeout=60)
async def python_once(code: str) -> str:
    """Run a Python program and read what it prints, and the value of its last line. Every call begins anew.

    Args:
        code: for example: x = 6; print(x * 7)
    """
    return shown(await shared_pool(LIMITS).run(code))


for runner in (python, python_once):
    runner.sandboxed = True


def shown(outcome: Outcome) -> str:
    """What the model reads. Code that fails is an answer of a tool that worked, so it says so itself."""
    return outcome.output or ("(no output)" if outcome.ok else outcome.error)
