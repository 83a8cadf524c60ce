"""Where environments run: in the event loop, in threads, or in processes."""

from __future__ import annotations

from arborl.envs.env import Env
from arborl.rollout.processes import ProcessEnv, Processes
from arborl.rollout.threads import ThreadEnv, Threads
from arborl.types import Metrics

CALLS = ("reset", "step", "close")
KILLABLE = " Give what it waits for a time limit of its own, or write rollout.workers=process: processes can be killed."


class Workers:
    """Gives every environment its place.

    Args:
        kind: `auto`, `thread`, `process` or `none`; see `rollout.workers`.
        per_process: environments in one process; 0 divides them among the cores.

    Example:
        env = await workers.place(FrozenLake(), "frozen_lake", seconds=30)
    """

    def __init__(self, kind: str = "auto", per_process: int = 0):
        self.kind = kind
        self.threads = Threads()
        self.processes = Processes(per_process)

    async def place(self, env: Env, name: str, seconds: float) -> Env:
        """The environment, to be called in the same way from here.

        Args:
            env: fresh.
            name: what failures call it.
            seconds: what one call may take before its process is given up.
        """
        if self.kind == "process":
            placed = ProcessEnv(env, self.processes, f"environment {name!r}", seconds)
            await placed.open()
            return placed
        if self.kind == "thread" or (self.kind == "auto" and blocks(env)):
            self.threads.left.admit(f"environment {name!r}", KILLABLE)
            return ThreadEnv(env, self.threads, f"environment {name!r}", seconds)
        return env

    def metrics(self) -> Metrics:
        """What was left behind or replaced since the last call, and what there is."""
        found = self.threads.metrics()
        return found | self.processes.metrics() if self.kind == "process" else found

    def close(self) -> None:
        """End the processes; threads end by themselves."""
        self.processes.close()


def blocks(env: Env) -> bool:
    """Whether an environment's calls may take their time without letting others run: unless it says that they do not.

    That `reset` and `step` are `async` says nothing: what they call may block, and then nobody else plays, no deadline
    is kept and Ctrl-C is not heard. The word of a class is about its own calls: one that overrides them gives its own.
    """
    if "blocking" in getattr(env, "__dict__", ()):
        return bool(vars(env)["blocking"])
    for kind in type(env).__mro__:
        if "blocking" in vars(kind):
            return bool(vars(kind)["blocking"])
        if any(call in vars(kind) for call in CALLS):
            return True
    return True
