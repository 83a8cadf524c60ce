"""The cluster of a run: joined where there is one, else started here and stopped with the run.

What is asked of it is compared with what it has before anything is started there. Whatever was started is stopped when
the run ends, however it ends: processes of a cluster die with the driver's connection, and a cluster of the run's own
dies with the driver.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from arborl.cluster.host import versions
from arborl.cluster.own_cluster import OwnCluster
from arborl.cluster.pulse import GROUP, Pulse
from arborl.cluster.seats import Node, Seat, find_node, gpus_of
from arborl.config.engine_config import PlacementConfig
from arborl.errors import ConfigError
from arborl.sandbox import unsafe_allowed

log = logging.getLogger(__name__)

REACH = 5.0
"""Seconds to reach the head of a cluster."""
STORE = 128 * 2**20
"""Bytes of the object store of a cluster of our own, beside three times the weights."""
CONCURRENCY = 10_000
"""Requests that a process may have under way."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # who has no GPU finds its environment as it is
    "RAY_worker_niceness": "0",  # engines do the work of the run: they come after nobody
}
"""Ray's own, where the environment says nothing else."""

Actor = Any
"""A handle that Ray gives."""


def address_of(placement: PlacementConfig) -> str | None:
    """The cluster to join, if there is one."""
    return placement.address or os.environ.get("RAY_ADDRESS") or None


def check_there(placement: PlacementConfig) -> None:
    """That Ray is installed, and that somebody listens at the address; in a moment, before anything else is done."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "placement=ray needs the package ray. Install it: pip install 'arborl[ray]', or write placement=local."
        )
    address = address_of(placement)
    if address is None or address in ("auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_where(placement)}: no Ray cluster answers there ({error}). Start its head there with `ray start --head "
            "--port=6379`, or leave the address out: the run then starts a cluster of its own."
        ) from error


def _where(placement: PlacementConfig) -> str:
    return f"placement.address={placement.address}" if placement.address else f"RAY_ADDRESS={address_of(placement)}"


class Cluster:
    """A connection to a cluster.

    Args:
        placement: what the run wants of it.
        weight_bytes: of the model, for the size of an object store of our own.
        ranks: of the learner, that are to be there.

    Example:
        cluster = Cluster(config.placement)
        actor = cluster.start(EngineHost, "engine 0", args, cpus=1)
        cluster.close()
    """

    mine: ClassVar[bool] = False
    """Whether this process was connected here, and not by its caller: a process has one connection."""
    users: ClassVar[int] = 0
    """Runs that use it; the last ends it."""
    own: ClassVar[OwnCluster | None] = None
    """Where it was started here, what it was started with."""

    def __init__(self, placement: PlacementConfig, weight_bytes: int = 0, ranks: int = 0):
        import ray

        self.ray, self.placement, self.ranks, self.whose = ray, placement, ranks, "that this process is in"
        self.started: list[Actor] = []
        self.lock = threading.Lock()
        self.closed = False
        if not ray.is_initialized():
            self._connect(weight_bytes)
            Cluster.mine = True
        Cluster.users += 1
        self.pulse = Pulse(ray, ray.get_runtime_context().get_node_id())
        try:
            self.nodes = self.alive()
            self._check()
        except BaseException:
            self.close()
            raise

    def _connect(self, weight_bytes: int) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        address = address_of(self.placement)
        more: dict[str, Any] = {"address": address}
        if address is None:
            store = max(STORE, STORE + 3 * weight_bytes)
            here = os.cpu_count() or 1
            cores = max(self._cpus, here)
            if self._cpus > 2 * here:
                log.warning("the run asks for %d cores and this machine has %d: processes take turns", self._cpus, here)
            more = {"address": "local", "num_cpus": cores, "object_store_memory": store, "include_dashboard": False}
            Cluster.own = OwnCluster()
            more |= Cluster.own.options
        relay_output()
        until = time.monotonic() + self.placement.seconds
        while True:
            try:
                with own_signals():
                    self.ray.init(logging_level=logging.ERROR, **more)
                break
            except Exception as error:
                self.ray.shutdown()
                if address is not None or time.monotonic() > until:  # a busy machine may start one at a second try
                    self._close_own()
                    raise ConfigError(self._refused(address, error)) from error
            except BaseException:
                self._close_own()
                raise
        try:
            if Cluster.own is not None:
                Cluster.own.check(self.ray)
        except ConfigError:
            self.ray.shutdown()
            self._close_own()
            raise
        self.whose = f"joined at {address}" if address else "of its own"

    def _refused(self, address: str | None, error: Exception) -> str:
        said = " ".join(str(error).split())[:400]
        if "ersion mismatch" in said:
            return (
                f"{_where(self.placement)}: the cluster's versions are not this process's ({said}). Install the same "
                "Python and Ray on every node."
            )
        if address is not None:
            return (
                f"{_where(self.placement)}: the cluster cannot be joined ({type(error).__name__}: {said}). Set "
                "RAY_AUTH_MODE and RAY_AUTH_TOKEN as on its head, and run this on one of its nodes."
            )
        return f"placement=ray: no cluster could be started here ({type(error).__name__}: {said})."

    def __str__(self) -> str:
        placed = self.placement
        parts = {"engines": placed.engines, "environment workers": placed.env_workers}
        parts |= {"reward workers": placed.reward_workers, "further ranks of the learner": self.ranks}
        there = ", ".join(f"{count} {name}" for name, count in parts.items() if count)
        return f"a Ray cluster {self.whose}, {len(self.nodes)} node(s): {there}"

    # ------------------------------------------------------------------------------------------ what it has

    @property
    def _cpus(self) -> int:
        placed = self.placement
        return placed.engines * placed.cpus_per_engine + placed.env_workers + placed.reward_workers + self.ranks

    def alive(self) -> list[Node]:
        """Its nodes, the driver's first, the others by address."""
        here = self.ray.get_runtime_context().get_node_id()
        found = [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                float(node["Resources"].get("CPU", 0)),
                int(node["Resources"].get("GPU", 0)),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]
        return sorted(found, key=lambda node: (node.id != here, node.address, node.id))

    def _check(self) -> None:
        """That it is large enough. One that grows by itself is asked for no more than it has now."""
        has = sum(node.cpus for node in self.nodes)
        if self._cpus > has:
            placed, ranks = self.placement, f", learner.ranks={self.ranks + 1} but one" if self.ranks else ""
            raise ConfigError(
                f"placement asks for {self._cpus} cores (engines={placed.engines} x cpus_per_engine="
                f"{placed.cpus_per_engine}, env_workers={placed.env_workers}, reward_workers={placed.reward_workers}"
                f"{ranks}), and the cluster has {has:g} on {len(self.nodes)} node(s). Ask for fewer, or add nodes."
            )
        each = self.placement.cpus_per_engine
        if self.placement.engines > (room := sum(int(node.cpus // each) for node in self.nodes)):
            have = ", ".join(f"{node.cpus:g}" for node in self.nodes)
            raise ConfigError(
                f"placement.engines={self.placement.engines} x cpus_per_engine={each}: an engine is on one node, and "
                f"the cluster's have {have} cores, room for {room}. Ask for fewer cores each, or fewer engines."
            )
        gpus = gpus_of(self.nodes)
        for number in self.placement.device_mapping.engines:
            if number >= len(gpus):
                raise ConfigError(
                    f"placement.device_mapping.engines names GPU {number}, and the cluster has {len(gpus)} on "
                    f"{len(self.nodes)} node(s), counted from 0. Name GPUs that exist, or add nodes."
                )

    def seats(self, own: int | None) -> list[Seat | None]:
        """The GPU of each engine; None for one without.

        Args:
            own: the learner's GPU on the driver's node, where it has one.
        """
        gpus, named = gpus_of(self.nodes), self.placement.device_mapping.engines
        if named:
            return [gpus[number] for number in named]
        if own is None:
            return [None] * self.placement.engines
        free = [seat for number, seat in enumerate(gpus) if number != own]
        if self.placement.engines > len(free):
            raise ConfigError(
                f"placement.engines={self.placement.engines}: each takes a GPU, and beside the learner's the cluster "
                f"has {len(free)}. Write fewer engines, or placement.device_mapping.engines=[…] to share some."
            )
        return list(free[: self.placement.engines])

    # ------------------------------------------------------------------------------------------ what runs there

    def start(
        self, kind: type, *args: Any, cpus: float = 1, seat: Seat | None = None, sharing: int = 1, **more: Any
    ) -> Actor:
        """A process on the cluster that answers as a `kind`; where there is room, spread over nodes.

        Args:
            kind: a `Host`, by its class.
            args, more: of its constructor, after `paths` and `allow_unsafe`.
            cpus: cores that it takes.
            seat: the GPU that it is to have.
            sharing: how many share that GPU.
        """
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "memory": 1,  # a byte: who asks for nothing at all is sent to any node, be it cut off
            "max_restarts": 0,  # it is started anew by whoever knows what it must be given first
            "max_concurrency": CONCURRENCY,
            "scheduling_strategy": "SPREAD",
        }
        if shunned := self.pulse.shunned:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(shunned)})"}
        if seat is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            node = find_node(seat, self.alive())
            shown = {"CUDA_VISIBLE_DEVICES": str(seat.index), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            options |= {
                "num_gpus": 1 / sharing,
                "runtime_env": {"env_vars": shown},
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            }
        paths = [path or os.getcwd() for path in sys.path]
        with self.lock:
            if self.closed:
                raise ConfigError("the cluster of the run was closed")
            made = self.ray.remote(concurrency_groups={GROUP: 1})(kind)
            actor = made.options(**options).remote(paths, unsafe_allowed(), *args, **more)
            self.started.append(actor)
            self.pulse.add(actor)
        return actor

    def stop(self, actor: Actor) -> None:
        """End a process, whatever it does."""
        with self.lock:
            self.started = [other for other in self.started if other is not actor]
        self.pulse.forget(actor)
        with suppress(Exception):  # it may be gone, or the cluster
            self.ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """End what was started there; and the cluster where it is the run's own. Once is enough."""
        with self.lock:
            if self.closed:
                return
            self.closed, left, self.started = True, self.started, []
        self.pulse.close()
        for actor in left:
            with suppress(Exception):
                self.ray.kill(actor, no_restart=True)
        Cluster.users -= 1
        if Cluster.mine and not Cluster.users:
            Cluster.mine = False
            self.ray.shutdown()
            self._close_own()

    def _close_own(self) -> None:
        own, Cluster.own = Cluster.own, None
        if own is not None:
            own.close()

    @property
    def versions(self) -> Mapping[str, str]:
        """The driver's."""
        return versions()


@contextmanager
def own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run has its own way to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def relay_output() -> None:
    """What processes of the cluster write, and what Ray says of them, becomes lines of our log, and so of `run.log`.

    Ray would print it on standard output, among what a command answers. It has no public way to say otherwise; where
    its own changes, it prints.
    """
    with suppress(ImportError):
        from ray._private import worker

        if hasattr(worker, "print_worker_logs"):
            worker.print_worker_logs = _heard


def _heard(data: Mapping[str, Any], *_: Any) -> None:
    if data.get("pid") == "autoscaler":  # several lines every five seconds
        return
    who = data.get("actor_name") or data.get("task_name") or "process"
    where = f"{who} {data.get('pid')}" + (f" on {data['ip']}" if data.get("ip") else "")
    for line in data.get("lines", ()):
        log.info("%s: %s", where, str(line).rstrip())
