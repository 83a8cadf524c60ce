"""Environments on a Ray cluster: worker processes as with `rollout.workers=process`, on any node.

When one hangs or dies, its environments are created in another process and replayed (`arborl.rollout.env_processes`);
no episode is lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from arborl.cluster.placement.actors import ActorInfo, ClusterActor, check_versions
from arborl.cluster.placement.batched_calls import ActorCalls
from arborl.cluster.placement.ray_cluster import RayCluster
from arborl.errors import ConfigError, EngineError
from arborl.rollout.env_processes import POLL_SECONDS, EnvProcess, EnvServer, ProcessPool


class EnvironmentActor(ClusterActor):
    """Holds environments, each in its own thread."""

    def __init__(self, paths: Sequence[str], allow_unsafe: bool):
        super().__init__(paths, allow_unsafe)
        self.worker = EnvServer()

    async def ask(self, packed: bytes) -> bytes:
        """A request and its answer, in the format of `process_main`."""
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
    """The driver's side of an `EnvironmentActor`."""

    blames_envs = False  # a lost node is no fault of the environment

    def __init__(self, cluster: RayCluster, name: str, alone: bool, cpus: int):
        super().__init__(alone, cluster.placement.seconds)
        self.cluster, self.name, self.end = cluster, name, ""
        self.noticed = threading.Event()
        """Wakes the watching thread; Ray's callback threads must not block."""
        self.actor = cluster.start(EnvironmentActor, cpus=cpus)
        self.calls = ActorCalls(self.actor)
        self.actor.info.remote().future().add_done_callback(self._begin)
        threading.Thread(target=self._watch, name="arborl-cluster", daemon=True).start()

    def _begin(self, outcome: Future[ActorInfo]) -> None:
        if (error := outcome.exception()) is not None:
            self._lose(error)
            return
        info = outcome.result()
        self.name = f"{self.name} (process {info.pid} on {info.address})"
        try:
            check_versions(self.cluster.versions, info.versions, self.name)
        except Exception as other:
            self._lose(other)
            return
        with self.lock:
            one = self.pending.pop(0, None)
        if one is not None:
            one.outcome.set_result(None)

    def _send(self, packed: bytes) -> None:
        self.calls.call("ask", packed).add_done_callback(self._on_answer)

    def _on_answer(self, outcome: Future[Any]) -> None:
        if (error := outcome.exception()) is not None:
            self._lose(error)
        else:
            self._receive(outcome.result())

    def _lose(self, error: BaseException) -> None:
        if not self.lost:
            self.end, self.lost = _cause(error), True
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
        return f"{self.name} is gone: {self.end or 'it was stopped'}"


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, EngineError) else type(error).__name__


def environment_processes(cluster: RayCluster) -> ProcessPool:
    """`placement.env_workers` processes. The first is started now, so that errors appear before the run folder is
    written."""
    numbers, most = count(), cluster.placement.env_workers

    def start(alone: bool) -> RayHolder:
        """A replacement requests no core: after the loss of a node there may be none left."""
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
