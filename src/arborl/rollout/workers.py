"""Where environments run: in the event loop, in threads, or in processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from arborl.envs.env import Env
from arborl.envs.wrapper import env_class_name, is_blocking
from arborl.errors import EpisodeError
from arborl.rollout.processes import ProcessEnv, Processes
from arborl.rollout.threads import ThreadEnv, Threads
from arborl.types import Metrics

KILLABLE = " Give what it waits for a time limit of its own, or write rollout.workers=process: processes can be killed."


class Workers:
    """Gives every environment its place.

    Args:
        kind: `auto`, `thread`, `process` or `none`; see `rollout.workers`.
        per_process: environments in one process; 0 divides them among the cores.
        processes: where these come from, if not from this machine.

    Example:
        env, name = await workers.place(FrozenLake, "frozen_lake", seconds=30)
    """

    def __init__(self, kind: str = "auto", per_process: int = 0, processes: Processes | None = None):
        self.kind = kind
        self.threads = Threads()
        self.processes = processes or Processes(per_process)
        self.met: set[str | None] = set()
        self.near: set[str | None] = set()
        """Names of environments that said they do not block; None is the run's own."""

    @property
    def costly(self) -> bool:
        """Whether environments have threads or processes of their own."""
        return self.kind in ("thread", "process") or (self.kind == "auto" and not self.met <= self.near)

    async def meet(self, make: Callable[[], Env], name: str | None, seconds: float) -> None:
        """Find out, with one that is never played, whether environments of a name block; before the first is placed."""
        if self.kind != "auto" or name in self.met:
            return
        self.met.add(name)
        with suppress(EpisodeError):  # who plays it will be told
            one = ThreadEnv(self.threads, f"environment {name!r}" if name else "environment of the run", seconds)
            await one.open(make)
            one.release()
            if not is_blocking(one.env):
                self.near.add(name)

    async def place(self, make: Callable[[], Env], name: str | None, seconds: float) -> tuple[Env, str]:
        """The environment, to be called in the same way from here, and its name.

        It is made where it will run: what it opens then (a database) may belong to its thread.

        Args:
            make: gives a fresh one.
            name: what failures call it; its class's name by default.
            seconds: what one call may take, making it included.
        """
        if self.kind == "none" or (self.kind == "auto" and name in self.near):
            env = make()
            if self.kind == "none" or not is_blocking(env):
                return env, name or env_class_name(env)
            self.near.discard(name)  # another class by the same name: it is made anew, elsewhere
        threaded = ThreadEnv(self.threads, f"environment {name!r}" if name else "environment of the run", seconds)
        self.threads.left.admit(threaded.name, KILLABLE)
        await threaded.open(make)
        env, name = threaded.env, name or env_class_name(threaded.env)
        if self.kind == "thread" or (self.kind == "auto" and is_blocking(env)):
            return threaded, name
        threaded.release()
        if self.kind == "auto":  # nobody met it before
            return env, name
        placed = ProcessEnv(env, self.processes, f"environment {name!r}", seconds)
        await placed.open()
        return placed, name

    def metrics(self) -> Metrics:
        """What was left behind or replaced since the last call, and what there is."""
        found = self.threads.metrics()
        return found | self.processes.metrics() if self.kind == "process" else found

    def close(self) -> None:
        """End the processes; threads end by themselves."""
        self.processes.close()
