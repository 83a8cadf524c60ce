"""Environments on a Ray cluster: processes as `rollout.workers=process` has them, on any node.

One that hangs or dies, alone or with its node, costs nobody an episode: its environments are set up elsewhere and
brought to where they were (`arborl.rollout.env_processes`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from arborl.cluster.connection import Cluster
from arborl.cluster.host import Host, Told, check_versions
from arborl.errors import ConfigError, EngineError
from arborl.rollout.env_processes import POLL_SECONDS, EnvProcess, EnvServer, ProcessPool


class EnvironmentHost(Host):
    """The other side: holds environments, each in a thread of its own."""

    def __init__(self, paths: Sequence[str], allow_unsafe: bool):
        super().__init__(paths, allow_unsafe)
        self.worker = EnvServer()

    async def ask(self, packed: bytes) -> bytes:
        """A request and its answer, as `process_main` has them."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[bytes] = loop.create_future()

        def settle(answer: bytes) -> None:
            if not outcome.done():
                outcome.set_result(answer)

        def answer(packed: bytes) -> None:
            loop.call_soon_threadsafe(settle, packed)

        self.worker.submit(packed, answer)
        return await outcome


class RayHolder(EnvProcess):
    """One such process, seen from the driver."""

    blames_envs = False  # nodes go, too

    def __init__(self, cluster: Cluster, name: str, alone: bool, cpus: int):
        super().__init__(alone, cluster.placement.seconds)
        self.cluster, self.name, self.end = cluster, name, ""
        self.noticed = threading.Event()
        """Something is to be done that must not be done in a thread of Ray's, where answers come."""
        self.actor = cluster.start(EnvironmentHost, cpus=cpus)
        self.actor.told.remote().future().add_done_callback(self._begin)
        threading.Thread(target=self._watch, name="arborl-cluster", daemon=True).start()

    def _begin(self, outcome: Future[Told]) -> None:
        if (error := outcome.exception()) is not None:
            self._lose(error)
            return
        told = outcome.result()
        self.name = f"{self.name} (process {told.pid} on {told.address})"
        try:
            check_versions(self.cluster.versions, told.versions, self.name)
        except Exception as other:
            self._lose(other)
            return
        with self.lock:
            one = self.pending.pop(0, None)
        if one is not None:
            one.outcome.set_result(None)

    def _send(self, packed: bytes) -> None:
        try:
            asked = self.actor.ask.remote(packed)
        except Exception as error:  # the cluster is gone
            raise OSError(str(error)) from error
        asked.future().add_done_callback(self._came)

    def _came(self, outcome: Future[Any]) -> None:
        if (error := outcome.exception()) is not None:
            self._lose(error)
        else:
            self._receive(outcome.result())

    def _lose(self, error: BaseException) -> None:
        if not self.lost:
            self.end, self.lost = _why(error), True
            self._log_loss()
        self.noticed.set()

    def _watch(self) -> None:
        while not self.lost:
            self.noticed.wait(POLL_SECONDS)
            self._kill_overdue()
        self.cluster.stop(self.actor)
        self._fail_pending()

    def kill(self) -> None:
        self.lost = True
        self.noticed.set()

    def exit_reason(self) -> str:
        return f"{self.name} is gone: {self.end or 'it was ended'}"


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, EngineError) else type(error).__name__


def environment_processes(cluster: Cluster) -> ProcessPool:
    """As many as `placement.env_workers` says, on the cluster. The first is started now: what is wrong with the nodes
    is found before anything is written."""
    numbers, most = count(), cluster.placement.env_workers

    def start(alone: bool) -> RayHolder:
        """One that takes the place of another asks for no core: a cluster that has lost a node may have none left, and
        episodes would wait for it."""
        number = next(numbers)
        return RayHolder(cluster, f"environment worker {number}", alone, cpus=1 if number < most and not alone else 0)

    processes = ProcessPool(most=most, start=start)
    first, _ = processes.take()
    first.num_envs -= 1
    try:
        first.ready.result(cluster.placement.seconds)
    except Exception as error:
        raise ConfigError(f"placement.env_workers={cluster.placement.env_workers}: {error}") from error
    return processes
