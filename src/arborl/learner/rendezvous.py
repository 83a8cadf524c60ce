"""How ranks find each other, and notice when one is gone.

Ranks meet at a `RunStore`, served by the process that drives. A rank is let in with the secret of the run. There each
says which versions it runs, before anything else is said; and every second that it is alive, so that one that has died,
or whose host cannot be reached any more, is named within seconds and nobody waits for it.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch
import torch.distributed as dist

from arborl.errors import ConfigError
from arborl.learner.launched_secret import join_launched
from arborl.learner.peers import PATIENT, Peers
from arborl.learner.rank_connections import prove_connections, use_interface_of
from arborl.learner.run_store import JoinInfo, RunStore, StoreServer, seal

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 60.0
"""Seconds without one, once there has been a first, after which a rank counts as lost; one whose process is seen to end
is lost at once."""
START = 300.0
"""Seconds in which all ranks must have come."""


class Launcher(Protocol):
    """What has started the other ranks."""

    def lost(self) -> dict[int, str]:
        """Ranks whose processes have ended, and how."""
        ...

    def stop(self) -> None:
        """End them, at once."""
        ...


class Starter(Launcher, Protocol):
    """Starts them on other machines."""

    host: str
    """The address of this one, as they reach it."""

    def start(self, info: JoinInfo) -> None:
        """All further ranks; they come to the meeting there."""
        ...


class Nobody:
    """There are no others, or somebody else has started them and sees to their end."""

    def lost(self) -> dict[int, str]:
        return {}

    def stop(self) -> None:
        """It is not ours to end them: they find out at the store."""


@dataclass(slots=True)
class Meeting:
    """Where ranks meet, and which one this is."""

    store: RunStore
    rank: int
    count: int
    session: str = field(default="", repr=False)
    """The key with which ranks prove who they are, once the meeting has begun."""
    undo: Callable[[], None] = lambda: None
    """Undoes the choice of a network interface."""

    @classmethod
    def host(cls, count: int, address: str = "", secret: str = "") -> tuple[Meeting, JoinInfo]:
        """A meeting that this process, rank 0, is host to; and what the others need to join it.

        Args:
            count: of all ranks.
            address: of this host, where other ranks are on other hosts; without one all are on this one.
            secret: of the run; without one it is made here.
        """
        server = StoreServer(address, secret)
        server.data.set("nonce", secrets.token_bytes(32))
        return cls(RunStore(server.info, server, START), 0, count), server.info

    @classmethod
    def visit(cls, rank: int, count: int, info: JoinInfo) -> Meeting:
        """The meeting at that address."""
        return cls(RunStore(info, seconds=START), rank, count)

    @classmethod
    def around(cls) -> Meeting | None:
        """Where torchrun or Accelerate have started this process, a meeting of all processes that they have started.
        Their store, which serves every client, is used only to find it."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or "MASTER_ADDR" not in os.environ:
            return None
        store, rank, count = next(dist.rendezvous("env://", timeout=timedelta(seconds=START)))
        found = join_launched(dist.PrefixStore("arborl", store), rank, lambda *given: cls.host(count, *given))
        return found if isinstance(found, Meeting) else cls.visit(rank, count, found)

    def begin(self, device: torch.device, look: Callable[[], None] = lambda: None) -> None:
        """Wait until all are here, make sure that they are alike, and open the lines between them.

        Args:
            look: called while waiting; raises where there is nobody to wait for any more.
        """
        here = self.store.local_address
        self.session = seal(self.store.info.secret, "session", self.store.get("nonce")).hex()
        self.store.set(f"hello/{self.rank}", json.dumps(about_me(here)))
        until = time.monotonic() + START
        while missing := [rank for rank in range(self.count) if not self.store.check([f"hello/{rank}"])]:
            look()
            if time.monotonic() > until:
                raise ConfigError(
                    f"learner.ranks={self.count}: {named(missing)} did not come within {START:g} s. See what it wrote."
                )
            time.sleep(0.05)
        everyone = [json.loads(self.store.get(f"hello/{rank}")) for rank in range(self.count)]
        check_alike(everyone)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.undo = use_interface_of(here)
        dist.init_process_group(
            backend, store=dist.PrefixStore("lines", self.store), rank=self.rank, world_size=self.count, timeout=PATIENT
        )
        assert dist.group.WORLD is not None
        prove_connections(dist.group.WORLD, self.session)

    def peers(self) -> Peers:
        """The processes that have met."""
        return Peers(dist.group.WORLD, self.session)

    def close(self) -> None:
        """Leave it; rank 0 ends it."""
        self.undo()
        if self.store.server is not None:
            self.store.server.close()


def about_me(address: str = "") -> dict[str, str]:
    """What must be the same in all ranks, and where this one is, by name and by address."""
    try:
        own = version("arborl")
    except PackageNotFoundError:  # used from its sources, without having been installed
        own = "0"
    versions = {"arborl": own, "torch": torch.__version__, "python": platform.python_version()}
    return versions | {"host": socket.gethostname(), "address": address}


def check_alike(everyone: list[dict[str, str]]) -> None:
    """ConfigError where ranks run different versions."""
    for what in ("arborl", "torch", "python"):
        for rank, one in enumerate(everyone):
            if one[what] != everyone[0][what]:
                first = everyone[0]
                raise ConfigError(
                    f"learner rank {rank} on {one['host']} runs {what} {one[what]}, and rank 0 on {first['host']} runs "
                    f"{first[what]}. Install the same version on both."
                )


def named(ranks: list[int]) -> str:
    """In words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class Watch:
    """Shows that this rank is alive, and looks whether others are; in a thread of its own.

    Args:
        meeting: where.
        others: whom to look after: all others in rank 0, rank 0 in all others.
        gone: called once, with whom and why.
        launcher: knows at once whose process has ended.
    """

    def __init__(
        self, meeting: Meeting, others: list[int], gone: Callable[[int, str], None], launcher: Launcher | None = None
    ):
        self.meeting, self.others, self.gone, self.launcher = meeting, others, gone, launcher or Nobody()
        self.store = meeting.store
        self.over = threading.Event()
        self.heard: dict[int, tuple[bytes, float]] = {}
        self.thread = threading.Thread(target=self._watch, name="arborl-ranks", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Look no more."""
        self.over.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(5)

    def _watch(self) -> None:
        count = 0
        while not self.over.wait(BEAT / 4):
            count += 1
            lost = self.launcher.lost()
            try:
                if count % 4 == 0:
                    self.store.set(f"alive/{self.meeting.rank}", str(count))
                    lost |= self._silent()
            except Exception as error:  # the store is gone, and with it the process that drives
                lost |= {0: f"cannot be reached ({type(error).__name__})"}
            lost = {rank: self._said(rank) or why for rank, why in lost.items()}
            if lost and not self.over.is_set():
                first = min(lost)
                self.over.set()
                self.gone(first, lost[first])

    def _silent(self) -> dict[int, str]:
        now, lost = time.monotonic(), dict[int, str]()
        for rank in self.others:
            if said := self._said(rank):
                lost[rank] = said
                continue
            key = f"alive/{rank}"
            beat = bytes(self.store.get(key)) if self.store.check([key]) else b""
            if rank not in self.heard or self.heard[rank][0] != beat:
                self.heard[rank] = beat, now
            elif beat and now - self.heard[rank][1] > SILENT:
                lost[rank] = f"gave no sign of life for {SILENT:g} s"
        return lost

    def _said(self, rank: int) -> str:
        """A rank's last words."""
        try:
            key = f"died/{rank}"
            return self.store.get(key).decode() if self.store.check([key]) else ""
        except Exception:
            return ""
