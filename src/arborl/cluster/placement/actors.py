"""Base class of the Ray actors of a run, version check, heartbeats.

Ray reports a dead process at once. A node with a broken network connection is given up by Ray only after a minute or
more. So every actor is polled for a heartbeat every few seconds, in a concurrency group that its work does not block.
An actor that has answered before and then is silent for `TIMEOUT` seconds is killed; pending calls then fail. If no
other actor of its node has answered meanwhile, new actors avoid that node for a while.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from arborl.cluster.placement.batched_calls import BatchedActor
from arborl.errors import EngineError

log = logging.getLogger(__name__)

COMPARED_PACKAGES = ("arborl", "torch", "transformers", "numpy")
"""Packages whose versions must be equal on all nodes."""
INTERVAL = 5.0
"""Seconds between two heartbeats."""
TIMEOUT = 20.0
"""Seconds without a heartbeat after which an actor is killed."""
AVOID_SECONDS = 120.0
"""Seconds for which no actor is started on a silent node; by then Ray has given it up, or it is back."""
HEARTBEAT_GROUP = "heartbeat"
"""Concurrency group of the heartbeat method."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that must be equal."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in COMPARED_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


class VersionMismatch(EngineError):
    """A node has other package versions than the driver. A retry cannot succeed."""


def check_versions(driver: Mapping[str, str], actor: Mapping[str, str], name: str) -> None:
    """VersionMismatch where an actor has other versions than the driver."""
    other = [
        f"{key} {actor.get(key, 'none')} (driver: {driver[key]})" for key in driver if actor.get(key) != driver[key]
    ]
    if other:
        raise VersionMismatch(f"{name} has {', '.join(other)}. Install the same versions on every node")


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Identity of an actor that is ready."""

    versions: Mapping[str, str]
    pid: int
    address: str
    node: str
    """Id of its node."""


class ClusterActor(BatchedActor):
    def __init__(self, paths: Sequence[str], allow_unsafe: bool):
        from arborl import sandbox

        super().__init__()

        sys.path.extend(path for path in paths if path not in sys.path)
        sandbox.allow_unsafe(allow_unsafe)

    async def info(self) -> ActorInfo:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return ActorInfo(versions(), os.getpid(), ray.util.get_node_ip_address(), node)

    async def heartbeat(self) -> bool:
        return True


@dataclass(slots=True)
class MonitoredActor:
    actor: Any
    call: Any
    """`info` first, then `heartbeat`."""
    last_seen: float
    info: ActorInfo | None = None
    """None until it is ready; no timeout applies before."""


class ActorHeartbeatMonitor:
    """Watches the actors of a run."""

    def __init__(self, ray: Any, driver_node: str):
        self.ray, self.driver_node = ray, driver_node
        self.monitored: dict[Any, MonitoredActor] = {}
        """By actor; several threads change it."""
        self.silent_nodes: dict[str, float] = {}
        """Time at which an actor of the node timed out."""
        self.last_check = time.monotonic()
        self.closed = threading.Event()
        threading.Thread(target=self._run, name="arborl-heartbeat", daemon=True).start()

    def add(self, actor: Any) -> None:
        self.monitored[actor] = MonitoredActor(actor, actor.info.remote(), time.monotonic())

    def remove(self, actor: Any) -> None:
        self.monitored.pop(actor, None)

    def close(self) -> None:
        self.closed.set()

    @property
    def avoided_nodes(self) -> list[str]:
        """Ids of nodes on which no actor is started now."""
        now = time.monotonic()
        return sorted(node for node, when in self.silent_nodes.items() if now - when < AVOID_SECONDS)

    def _run(self) -> None:
        while not self.closed.wait(INTERVAL):
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Collect heartbeats, and kill actors that have timed out."""
        if now - self.last_check > INTERVAL + TIMEOUT / 4:  # this process was suspended: no actor is at fault
            for one in list(self.monitored.values()):
                one.last_seen = now
        self.last_check = now
        for one in list(self.monitored.values()):
            with suppress(Exception):  # the cluster is gone, or the connection was closed
                self._check_actor(one, now)

    def _check_actor(self, one: MonitoredActor, now: float) -> None:
        if self.ray.wait([one.call], timeout=0)[0]:
            try:
                result = self.ray.get(one.call)
            except self.ray.exceptions.RayError:  # it is dead; pending calls fail by themselves
                self.remove(one.actor)
                return
            one.info = one.info or result
            one.call, one.last_seen = one.actor.heartbeat.options(concurrency_group=HEARTBEAT_GROUP).remote(), now
        elif one.info is not None and now - one.last_seen > TIMEOUT:
            name = f"process {one.info.pid} on {one.info.address}"
            log.warning("%s has sent no heartbeat for %.0f s and is killed", name, now - one.last_seen)
            self.remove(one.actor)
            if not self._node_answers(one.info.node, one.last_seen):
                self.silent_nodes[one.info.node] = now
            self.ray.kill(one.actor, no_restart=True)

    def _node_answers(self, node: str, since: float) -> bool:
        """Whether the node is reachable: the driver's, or one with another actor that answered since then."""
        others = [one for one in list(self.monitored.values()) if one.info is not None and one.info.node == node]
        return node == self.driver_node or any(one.last_seen > since + INTERVAL for one in others)
