"""How ranks find each other, prove that they belong to the run, and detect lost ranks.

Ranks meet at a `RunStore` that rank 0 serves; the secret of the run admits them. Each rank first publishes its
versions, and then a heartbeat every second. A rank that has died or cannot be reached is reported within seconds.

Processes that torchrun or Accelerate has started must first share a secret. The launcher's store serves every client,
so the secret cannot pass through it. On one host, rank 0 writes the secret into a file of mode 0600 in a folder of mode
0700, and publishes the folder in that store. The other ranks read the file only if file and folder belong to this user
and are closed to others: another user can publish a folder, but cannot create such a one. On several hosts, the
environment of all of them holds the secret, and rank 0 authenticates the address that it publishes with an HMAC.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import platform
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from arborl.errors import ConfigError
from arborl.learner.distributed.rank_group import ORDER_TIMEOUT, RankGroup, prove_connections, use_interface_of
from arborl.learner.distributed.run_store import UNIX, JoinInfo, RunStore, StoreServer, hmac_sha256

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat, after the first one, until a rank counts as lost; a process that is seen to end is lost
at once."""
START_TIMEOUT = 300.0  # seconds in which all ranks must join
SECRET_VARIABLE = "ARBORL_RANKS_SECRET"  # environment variable with the secret of all ranks
MIN_SECRET_LENGTH = 32  # characters of a secret that a user sets
SECRET_COMMAND = "`openssl rand -hex 32`"
ADDRESS_KEY = "where"
T = TypeVar("T")


class Launcher(Protocol):
    def lost(self) -> dict[int, str]: ...

    def stop(self) -> None: ...


class RemoteLauncher(Launcher, Protocol):
    host: str  # the address of this host, as they reach it

    def start(self, info: JoinInfo) -> None:
        """Start all further ranks; they join at `info`."""
        ...


@dataclass(slots=True)
class Rendezvous:
    """The store where ranks meet, and the rank of this process."""

    store: RunStore
    rank: int
    count: int
    session: str = field(default="", repr=False)  # the key with which ranks authenticate connections, set by `start`
    restore_interfaces: Callable[[], None] = lambda: None  # undoes the choice of a network interface

    @classmethod
    def create(cls, count: int, address: str = "", secret: str = "") -> tuple[Rendezvous, JoinInfo]:
        """On rank 0: a rendezvous that this process serves, and what the others need to join it."""
        server = StoreServer(address, secret)
        server.data.set("nonce", secrets.token_hex(32))
        return cls(RunStore(server.info, server, START_TIMEOUT), 0, count), server.info

    @classmethod
    def join(cls, rank: int, count: int, info: JoinInfo) -> Rendezvous:
        return cls(RunStore(info, seconds=START_TIMEOUT), rank, count)

    @classmethod
    def from_launcher(cls) -> Rendezvous:
        """The rendezvous of all processes that torchrun or Accelerate has started. The launcher's store, which serves
        every client, is used only to find it."""
        store, rank, count = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT)))
        joined = join_launched(dist.PrefixStore("arborl", store), rank, lambda *args: cls.create(count, *args))
        return joined if isinstance(joined, Rendezvous) else cls.join(rank, count, joined)

    def start(self, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        """Wait for all ranks, compare their versions, and open the connections between them."""
        address = self.store.local_address
        self.session = hmac_sha256(self.store.info.secret, "session", self.store.get("nonce")).hex()
        self.store.set(f"hello/{self.rank}", json.dumps(rank_versions(address)))
        until = time.monotonic() + START_TIMEOUT
        while missing := [rank for rank in range(self.count) if not self.store.check([f"hello/{rank}"])]:
            check()
            if time.monotonic() > until:
                raise ConfigError(
                    f"learner.ranks={self.count}: rank {', '.join(map(str, missing))} did not join within "
                    f"{START_TIMEOUT:g} s. See the output of that process."
                )
            time.sleep(0.05)
        check_versions([json.loads(self.store.get(f"hello/{rank}")) for rank in range(self.count)])
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.restore_interfaces = use_interface_of(address)
        if destroy_default_group():
            log.warning("an earlier learner in this process was not closed; its connections are closed now")
        store = dist.PrefixStore("lines", self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count, timeout=ORDER_TIMEOUT)
        assert dist.group.WORLD is not None
        prove_connections(dist.group.WORLD, self.session)

    def rank_group(self) -> RankGroup:
        return RankGroup(dist.group.WORLD, self.session)

    def close(self) -> None:
        self.restore_interfaces()
        if self.store.server is not None:
            self.store.server.close()


def destroy_default_group() -> bool:
    """Close the connections between ranks; returns whether there were any."""
    is_open = dist.is_initialized()
    if is_open:
        dist.destroy_process_group()
    return is_open


def rank_versions(address: str = "") -> dict[str, str]:
    try:
        arborl = version("arborl")
    except PackageNotFoundError:  # used from its sources without installation
        arborl = "0"
    versions = {"arborl": arborl, "torch": torch.__version__, "python": platform.python_version()}
    return versions | {"host": socket.gethostname(), "address": address}


def check_versions(ranks: list[dict[str, str]]) -> None:
    first = ranks[0]
    for package in ("arborl", "torch", "python"):
        for rank, one in enumerate(ranks):
            if one[package] != first[package]:
                raise ConfigError(
                    f"learner rank {rank} on {one['host']} runs {package} {one[package]}, and rank 0 on "
                    f"{first['host']} runs {first[package]}. Install the same version on both."
                )


class RankHeartbeatMonitor:
    """Sends this rank's heartbeat and checks others in a thread; calls `on_loss` once, with rank and reason."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        others: list[int],
        on_loss: Callable[[int, str], None],
        launcher: Launcher | None = None,
    ):
        self.rendezvous, self.others, self.on_loss = rendezvous, others, on_loss
        self.launcher, self.store = launcher, rendezvous.store
        self.stopped = threading.Event()
        self.last_beats: dict[int, tuple[bytes, float]] = {}
        self.thread = threading.Thread(target=self._run, name="arborl-ranks", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stopped.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(5)

    def _run(self) -> None:
        count = 0
        while not self.stopped.wait(HEARTBEAT_SECONDS / 4):
            count += 1
            lost = self.launcher.lost() if self.launcher is not None else {}
            try:
                if count % 4 == 0:
                    self.store.set(f"alive/{self.rendezvous.rank}", str(count))
                    lost |= self._silent_ranks()
            except Exception as error:  # the store is gone, and with it rank 0
                lost |= {0: f"cannot be reached ({type(error).__name__})"}
            lost = {rank: self._reported_end(rank) or why for rank, why in lost.items()}
            if lost and not self.stopped.is_set():
                first = min(lost)
                self.stopped.set()
                self.on_loss(first, lost[first])

    def _silent_ranks(self) -> dict[int, str]:
        now, lost = time.monotonic(), dict[int, str]()
        for rank in self.others:
            if reason := self._reported_end(rank):
                lost[rank] = reason
                continue
            key = f"alive/{rank}"
            beat = bytes(self.store.get(key)) if self.store.check([key]) else b""
            if rank not in self.last_beats or self.last_beats[rank][0] != beat:
                self.last_beats[rank] = beat, now
            elif beat and now - self.last_beats[rank][1] > HEARTBEAT_TIMEOUT:
                lost[rank] = f"sent no heartbeat for {HEARTBEAT_TIMEOUT:g} s"
        return lost

    def _reported_end(self, rank: int) -> str:
        """The reason that a rank stored when it ended; empty if there is none."""
        try:
            key = f"died/{rank}"
            return self.store.get(key).decode() if self.store.check([key]) else ""
        except Exception:
            return ""


def join_launched(store: Any, rank: int, create: Callable[[str, str], tuple[T, JoinInfo]]) -> T | JoinInfo:
    """On rank 0, create a rendezvous and publish its address; on other ranks, what they need to join it."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if 0 < len(secret) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(secret)} characters. Use {MIN_SECRET_LENGTH} random ones: {SECRET_COMMAND}."
        )
    if rank == 0:
        rendezvous, info = create(reachable_address() if secret else "", secret)
        if not secret:  # write it next to the socket, readable by this user alone
            handle = os.open(secret_file(info.address), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(info.secret)
        code = hmac_sha256(secret, ADDRESS_KEY, info.address).hex() if secret else ""
        store.set(ADDRESS_KEY, json.dumps([info.address, code]))
        return rendezvous
    address, code = json.loads(store.get(ADDRESS_KEY))
    if not secret:
        return JoinInfo(address, read_secret(address))
    if not hmac.compare_digest(code, hmac_sha256(secret, ADDRESS_KEY, address).hex()):
        raise ConfigError(f"{SECRET_VARIABLE} differs from that of rank 0. Set the same value on all hosts.")
    return JoinInfo(address, secret)


def reachable_address() -> str:
    """The address of this host, rank 0's, as other hosts reach it."""
    name = os.environ["MASTER_ADDR"]
    address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if not alone and str(address).startswith(("127.", "::1")):
        raise ConfigError(
            f"MASTER_ADDR={name} resolves to {address} on its own host, which other hosts cannot reach. Set an address "
            "that they can reach (torchrun --master-addr)."
        )
    return str(address)


def read_secret(address: str) -> str:
    """Read the secret next to a socket, if file and folder are closed to other users."""
    several = (
        f"ranks were started on several hosts, or by several users. Set {SECRET_VARIABLE} to the same random value for "
        f"all of them: {SECRET_COMMAND}."
    )
    if not address.startswith(UNIX):
        raise ConfigError(f"rank 0 has {SECRET_VARIABLE}, and this rank does not: {several}")
    file = secret_file(address)
    try:
        for path, is_kind in ((file.parent, stat.S_ISDIR), (file, stat.S_ISREG)):
            about = path.lstat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o077 or not is_kind(about.st_mode):
                raise ConfigError(f"{path}, named by the launcher's store, is open to other users: {several}")
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: {several}") from error


def secret_file(address: str) -> Path:
    return Path(address.removeprefix(UNIX)).parent / "secret"
