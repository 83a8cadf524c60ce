"""Where environments run: in the event loop, in threads, or in processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from arborl.envs.env import Env
from arborl.envs.wrapper import env_class_name, inner_attribute, is_blocking
from arborl.errors import EpisodeError
from arborl.rollout.env_processes import ProcessEnv, ProcessPool
from arborl.rollout.env_threads import ThreadEnv, ThreadPool
from arborl.types import Metrics

KILLABLE = " Give its calls a timeout, or write rollout.workers=process: processes can be killed."


class Workers:
    """Places environments in the event loop, in threads or in processes."""

    def __init__(self, kind: str = "auto", per_process: int = 0, processes: ProcessPool | None = None):
        self.kind = kind
        self.threads = ThreadPool()
        self.processes = processes or ProcessPool(per_process)
        self.probed: set[str | None] = set()
        self.non_blocking: set[str | None] = set()
        """Names of environments with `blocking = False`; None is the environment of the run."""

    @property
    def use_threads_or_processes(self) -> bool:
        return self.kind in ("thread", "process") or (self.kind == "auto" and not self.probed <= self.non_blocking)

    def _thread_env(self, name: str | None, seconds: float) -> ThreadEnv:
        return ThreadEnv(self.threads, f"environment {name!r}" if name else "environment of the run", seconds)

    async def probe(self, make: Callable[[], Env], name: str | None, seconds: float) -> None:
        """Make one environment of this name, to find out whether such environments block."""
        if self.kind != "auto" or name in self.probed:
            return
        self.probed.add(name)
        with suppress(EpisodeError):  # the first episode reports it
            env = self._thread_env(name, seconds)
            await env.open(make)
            env.release()
            if not is_blocking(env.env):
                self.non_blocking.add(name)

    async def place(self, make: Callable[[], Env], name: str | None, seconds: float) -> tuple[Env, str]:
        """The environment, wrapped if it runs elsewhere, and its name. It is made where it runs: what it opens (a
        database) may belong to its thread."""
        if self.kind == "none" or (self.kind == "auto" and name in self.non_blocking):
            env = make()
            if self.kind == "none" or not is_blocking(env):
                return env, name or env_class_name(env)
            self.non_blocking.discard(name)  # another class with the same name: it is made again, in a thread
        threaded = self._thread_env(name, seconds)
        self.threads.left.admit(threaded.name, KILLABLE)
        await threaded.open(make)
        env, name = threaded.env, name or env_class_name(threaded.env)
        in_process = self.kind == "process" or (self.kind == "auto" and inner_attribute(env, "isolated", False))
        if not in_process and (self.kind == "thread" or is_blocking(env)):
            return threaded, name
        threaded.release()
        if not in_process:  # it was not probed before
            return env, name
        placed = ProcessEnv(env, self.processes, f"environment {name!r}", seconds)
        await placed.open()
        return placed, name

    def metrics(self) -> Metrics:
        metrics = self.threads.metrics()
        has_processes = self.kind == "process" or self.processes.num_envs > 0
        return metrics | self.processes.metrics() if has_processes else metrics

    def close(self) -> None:
        self.processes.close()
