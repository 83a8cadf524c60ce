"""Connection to a Ray cluster, its nodes and GPUs, start and end of actors.

A run joins the cluster at `placement.address`, or starts a private one. Requested resources are compared with the
cluster's before anything is started. Actors die with the driver's connection; a private cluster dies with the driver.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from arborl.cluster.placement.actors import HEARTBEAT_GROUP, ActorHeartbeatMonitor, versions
from arborl.config.engine_config import PlacementConfig
from arborl.engines.remote.replicas import ReplicaUnavailable
from arborl.errors import ConfigError
from arborl.sandbox import unsafe_allowed

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
OBJECT_STORE = 128 * 2**20
"""Bytes of a private cluster's object store, besides three times the weights."""
CONCURRENCY = 10_000
"""Pending calls of an actor."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without a GPU keep CUDA_VISIBLE_DEVICES
    "RAY_worker_niceness": "0",
}
"""Defaults of Ray's environment variables."""

MIN_RAY = (2, 54)
"""First release whose token authentication covers every port; before, a node's agent accepted jobs without a token."""
LOOPBACK = "127.0.0.1"
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray assumes a single-node cluster and uses the loopback interface."""
MAX_PATH = 107 - len("/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Bytes of the folder's path: the path of a socket below it has at most 107."""

Actor = Any
"""A Ray actor handle."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    id: str
    address: str
    cpus: float
    gpus: int


@dataclass(frozen=True, slots=True)
class GpuSlot:
    node: ClusterNode
    index: int
    """On its node."""


def gpus_of(nodes: Sequence[ClusterNode]) -> list[GpuSlot]:
    """All GPUs, in the order in which `placement.device_mapping` counts them."""
    return [GpuSlot(node, index) for node in nodes for index in range(node.gpus)]


def find_node(gpu: GpuSlot, alive: Sequence[ClusterNode]) -> ClusterNode:
    """The GPU's node, or a restarted node at the same address; Unreachable if there is none."""
    for node in alive:
        if node.id == gpu.node.id:
            return node
    for node in alive:
        if node.address == gpu.node.address and node.gpus > gpu.index:
            return node
    raise ReplicaUnavailable(f"the node {gpu.node.address} with its GPU {gpu.index} is gone")


def address_of(placement: PlacementConfig) -> str | None:
    """Address of the cluster to join; None starts a private one."""
    return placement.address or os.environ.get("RAY_ADDRESS") or None


def check_ray_available(placement: PlacementConfig) -> None:
    """ConfigError if Ray is not installed, or if nothing listens at the cluster's address."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "placement=ray needs the package ray. Install it: pip install 'arborl[ray]', or write placement=local."
        )
    address = address_of(placement)
    if address is None or address in ("auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_where(placement)}: no Ray cluster answers ({error}). Start its head with `ray start --head "
            "--port=6379`, or leave the address out to start a private cluster."
        ) from error


def _where(placement: PlacementConfig) -> str:
    return f"placement.address={placement.address}" if placement.address else f"RAY_ADDRESS={address_of(placement)}"


class PrivateCluster:
    """Environment variables and folder of a cluster that a run starts for itself; `close` restores them.

    By default Ray listens on all interfaces, keeps its token in a file that other users can read, and its sockets in a
    folder that they can write to. Here the folder has mode 0700 and the token's file mode 0600; both are removed with
    the cluster. After the start, address and authentication mode are checked.
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="arborl-ray-")
        if len(os.fsencode(self.folder)) > MAX_PATH:
            os.rmdir(self.folder)
            self.folder = tempfile.mkdtemp(prefix="arborl-ray-", dir="/tmp")
        token = Path(self.folder, "token")
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), LOOPBACK_VARIABLE: "0"}
        self.before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_TOKEN")}
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the file
        os.environ.update(variables)
        self.options: dict[str, Any] = {"_node_ip_address": LOOPBACK, "_temp_dir": os.path.join(self.folder, "r")}
        reread_environment()

    def check(self, ray: Any) -> None:
        """ConfigError unless Ray uses the loopback interface and a token."""
        if tuple(map(int, ray.__version__.split(".")[:2])) < MIN_RAY:
            raise ConfigError(
                f"placement=ray: Ray {ray.__version__} accepts jobs without a token. Install "
                f"{'.'.join(map(str, MIN_RAY))} or newer."
            )
        here = ray.util.get_node_ip_address()
        if here != LOOPBACK or not uses_token():
            raise ConfigError(
                f"placement=ray: Ray {ray.__version__} started at {here}, {'with' if uses_token() else 'without'} "
                "token authentication. A private cluster must use the loopback interface and a token. "
                "Install another release of Ray, or start a cluster yourself and write placement.address."
            )

    def close(self) -> None:
        """Restore the environment and remove the folder, after the cluster was stopped."""
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        reread_environment()
        shutil.rmtree(self.folder, ignore_errors=True)


def reread_environment() -> None:
    """Make an imported Ray read its environment again, by its internals; `PrivateCluster.check` detects a failure."""
    if "ray" not in sys.modules:
        return
    with suppress(ImportError, AttributeError):
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_VARIABLE, "1") != "0"
    with suppress(ImportError, AttributeError):
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def uses_token() -> bool:
    try:
        raylet: Any = importlib.import_module("ray._raylet")
        return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
    except (ImportError, AttributeError):
        return False


class RayCluster:
    """A connection to a cluster."""

    owns_connection: ClassVar[bool] = False
    """Whether this class called `ray.init`; a process has one connection."""
    users: ClassVar[int] = 0
    """Number of open instances; the last one disconnects."""
    private: ClassVar[PrivateCluster | None] = None

    def __init__(self, placement: PlacementConfig, weight_bytes: int = 0, ranks: int = 0, threads: int = 1):
        import ray

        self.ray, self.placement, self.ranks, self.origin = ray, placement, ranks, "of this process"
        self.engine_cpus = max(threads, 1)
        self.started: list[Actor] = []
        self.lock = threading.Lock()
        self.closed = False
        if not ray.is_initialized():
            self._connect(weight_bytes)
            RayCluster.owns_connection = True
        RayCluster.users += 1
        self.monitor = ActorHeartbeatMonitor(ray, ray.get_runtime_context().get_node_id())
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
            store = max(OBJECT_STORE, OBJECT_STORE + 3 * weight_bytes)
            here = os.cpu_count() or 1
            cores = max(self._cpus, here)
            if self._cpus > 2 * here:
                log.warning("the run requests %d cores and this machine has %d", self._cpus, here)
            more = {"address": "local", "num_cpus": cores, "object_store_memory": store, "include_dashboard": False}
            RayCluster.private = PrivateCluster()
            more |= RayCluster.private.options
        relay_output()
        until = time.monotonic() + self.placement.seconds
        while True:
            try:
                with keep_signal_handlers():
                    self.ray.init(logging_level=logging.ERROR, **more)
                break
            except Exception as error:
                self.ray.shutdown()
                if address is not None or time.monotonic() > until:  # a second attempt may succeed on a busy machine
                    self._close_private()
                    raise ConfigError(self._connect_error(address, error)) from error
            except BaseException:
                self._close_private()
                raise
        try:
            if RayCluster.private is not None:
                RayCluster.private.check(self.ray)
        except ConfigError:
            self.ray.shutdown()
            self._close_private()
            raise
        self.origin = f"joined at {address}" if address else "started by this run"

    def _connect_error(self, address: str | None, error: Exception) -> str:
        text = " ".join(str(error).split())[:400]
        if "ersion mismatch" in text:
            return (
                f"{_where(self.placement)}: Python or Ray differs between the cluster and this process ({text}). "
                "Install the same Python and Ray on every node."
            )
        if address is not None:
            return (
                f"{_where(self.placement)}: cannot join the cluster ({type(error).__name__}: {text}). Set "
                "RAY_AUTH_MODE and RAY_AUTH_TOKEN as on its head, and run this on one of its nodes."
            )
        return f"placement=ray: cannot start a cluster ({type(error).__name__}: {text})."

    def __str__(self) -> str:
        placed = self.placement
        parts = {"engines": placed.engines, "environment workers": placed.env_workers}
        parts |= {"reward workers": placed.reward_workers, "further ranks of the learner": self.ranks}
        there = ", ".join(f"{count} {name}" for name, count in parts.items() if count)
        return f"a Ray cluster {self.origin}, {len(self.nodes)} node(s): {there}"

    # ------------------------------------------------------------------------------------------ resources

    @property
    def _cpus(self) -> int:
        placed = self.placement
        return placed.engines * self.engine_cpus + placed.env_workers + placed.reward_workers + self.ranks

    def alive(self) -> list[ClusterNode]:
        """Live nodes: the driver's first, the others by address."""
        here = self.ray.get_runtime_context().get_node_id()
        found = [
            ClusterNode(node["NodeID"], node["NodeManagerAddress"], float(has.get("CPU", 0)), int(has.get("GPU", 0)))
            for node in self.ray.nodes()
            for has in [node["Resources"]]
            if node["Alive"]
        ]
        return sorted(found, key=lambda node: (node.id != here, node.address, node.id))

    def _check(self) -> None:
        """ConfigError if the cluster has too few cores or GPUs. Autoscaling is not considered."""
        has = sum(node.cpus for node in self.nodes)
        if self._cpus > has:
            placed, ranks = self.placement, f", learner.ranks={self.ranks + 1} but one" if self.ranks else ""
            raise ConfigError(
                f"placement requests {self._cpus} cores (engines={placed.engines} x "
                f"threads={self.engine_cpus}, env_workers={placed.env_workers}, reward_workers={placed.reward_workers}"
                f"{ranks}), and the cluster has {has:g} on {len(self.nodes)} node(s). Write fewer, or add nodes."
            )
        each = self.engine_cpus
        if self.placement.engines > (room := sum(int(node.cpus // each) for node in self.nodes)):
            have = ", ".join(f"{node.cpus:g}" for node in self.nodes)
            raise ConfigError(
                f"placement.engines={self.placement.engines} x threads={each}: an engine runs on one node; "
                f"the nodes have {have} cores, enough for {room}. Write fewer threads, or fewer engines."
            )
        gpus = gpus_of(self.nodes)
        for number in self.placement.device_mapping.engines:
            if number >= len(gpus):
                raise ConfigError(
                    f"placement.device_mapping.engines names GPU {number}, and the cluster has {len(gpus)} on "
                    f"{len(self.nodes)} node(s), counted from 0. Name GPUs that exist, or add nodes."
                )

    def engine_gpus(self, learner_gpu: int | None) -> list[GpuSlot | None]:
        """The GPU of each engine; None for an engine on the CPU."""
        gpus, named = gpus_of(self.nodes), self.placement.device_mapping.engines
        if named:
            return [gpus[number] for number in named]
        if learner_gpu is None:
            return [None] * self.placement.engines
        free = [gpu for number, gpu in enumerate(gpus) if number != learner_gpu]
        if self.placement.engines > len(free):
            raise ConfigError(
                f"placement.engines={self.placement.engines}: each needs a GPU, and besides the learner's the cluster "
                f"has {len(free)}. Write fewer engines, or placement.device_mapping.engines=[…] to share some."
            )
        return list(free[: self.placement.engines])

    # ------------------------------------------------------------------------------------------ actors

    def start(
        self, kind: type, *args: Any, cpus: float = 1, gpu: GpuSlot | None = None, sharing: int = 1, **more: Any
    ) -> Actor:
        """Start an actor; actors are spread over the nodes."""
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "memory": 1,  # 1 byte: Ray sends an actor without any request to any node, even an unreachable one
            "max_restarts": 0,  # its owner restarts it with the current weights
            "max_concurrency": CONCURRENCY,
            "scheduling_strategy": "SPREAD",
        }
        if avoided := self.monitor.avoided_nodes:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoided)})"}
        if gpu is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            node = find_node(gpu, self.alive())
            shown = {"CUDA_VISIBLE_DEVICES": str(gpu.index), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            options |= {
                "num_gpus": 1 / sharing,
                "runtime_env": {"env_vars": shown},
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            }
        paths = [path or os.getcwd() for path in sys.path]
        with self.lock:
            if self.closed:
                raise ConfigError("the connection to the cluster is closed")
            made = self.ray.remote(concurrency_groups={HEARTBEAT_GROUP: 1})(kind)
            actor = made.options(**options).remote(paths, unsafe_allowed(), *args, **more)
            self.started.append(actor)
            self.monitor.add(actor)
        return actor

    def stop(self, actor: Actor) -> None:
        with self.lock:
            self.started = [other for other in self.started if other is not actor]
        self.monitor.remove(actor)
        with suppress(Exception):  # the actor or the cluster may be gone
            self.ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Kill all actors, and stop a private cluster."""
        with self.lock:
            if self.closed:
                return
            self.closed, left, self.started = True, self.started, []
        self.monitor.close()
        for actor in left:
            with suppress(Exception):
                self.ray.kill(actor, no_restart=True)
        RayCluster.users -= 1
        if RayCluster.owns_connection and not RayCluster.users:
            RayCluster.owns_connection = False
            self.ray.shutdown()
            self._close_private()

    def _close_private(self) -> None:
        private, RayCluster.private = RayCluster.private, None
        if private is not None:
            private.close()

    @property
    def versions(self) -> Mapping[str, str]:
        return versions()


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Restore signal handlers that Ray replaces."""
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
    """Write the output of Ray's processes to the log, and so to `run.log`, instead of standard output.

    Ray has no public setting for this; if its internals change, it prints.
    """
    with suppress(ImportError):
        from ray._private import worker

        if hasattr(worker, "print_worker_logs"):
            worker.print_worker_logs = _log_output


def _log_output(data: Mapping[str, Any], *_: Any) -> None:
    if data.get("pid") == "autoscaler":  # several lines every five seconds
        return
    name = data.get("actor_name") or data.get("task_name") or "process"
    where = f"{name} {data.get('pid')}" + (f" on {data['ip']}" if data.get("ip") else "")
    for line in data.get("lines", ()):
        log.info("%s: %s", where, str(line).rstrip())
