"""Where environments run: in the event loop, in threads, or in processes."""

from __future__ import annotations

import inspect
import logging

from arborl.envs.env import Env
from arborl.rollout.processes import ProcessEnv, Processes
from arborl.rollout.threads import ThreadEnv, Threads
from arborl.types import Metrics

log = logging.getLogger(__name__)


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
        self.slow: set[type] = set()
        """Kinds of environments that held the event loop without having said so."""

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
        if self.kind == "thread" or (self.kind == "auto" and (blocks(env) or type(env) in self.slow)):
            return ThreadEnv(env, self.threads)
        return env

    def held(self, env: Env, name: str, seconds: float) -> None:
        """An environment kept everybody from running for so long."""
        if self.kind == "auto" and not isinstance(env, ThreadEnv) and type(env) not in self.slow:
            self.slow.add(type(env))
            log.warning(
                "environment %r held all others up for %.2g s, so the next ones of its kind run in threads. Write "
                "`blocking = True` in its class to have them there from the start.",
                name,
                seconds,
            )

    def metrics(self) -> Metrics:
        """What was left behind or replaced since the last call, and what there is."""
        found = self.threads.metrics()
        return found | self.processes.metrics() if self.kind == "process" else found

    def close(self) -> None:
        """End the processes; threads end by themselves."""
        self.processes.close()


def blocks(env: Env) -> bool:
    """Whether an environment's calls may take their time without letting others run."""
    plain = not (inspect.iscoroutinefunction(env.reset) and inspect.iscoroutinefunction(env.step))
    return plain or bool(getattr(env, "blocking", False))
