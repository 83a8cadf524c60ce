"""How ranks find each other, and notice when one is gone.

Ranks meet at a store, a small server in the process that drives (or torchrun's). There each says which versions it
runs, before anything else is said; and every second that it is alive, so that one that has died, or whose host cannot
be reached any more, is named within seconds and nobody waits for it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
import torch.distributed as dist

from arborl.errors import ConfigError

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 60.0
"""Seconds without one, once there has been a first, after which a rank counts as lost; one whose process is seen to end
is lost at once."""
START = 300.0
"""Seconds in which all ranks must have come."""
PATIENT = timedelta(days=30)
"""What a rank waits for its next order: signs of life say that there is somebody to wait for."""


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

    def start(self, address: str) -> None:
        """All further ranks; they come to the meeting there."""
        ...


class Nobody:
    """There are no others, or somebody else has started them and sees to their end."""

    def lost(self) -> dict[int, str]:
        return {}

    def stop(self) -> None:
        """It is not ours to end them: they find out at the store."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet, and which one this is."""

    store: Any
    rank: int
    count: int

    @classmethod
    def host(cls, count: int, address: str = "127.0.0.1") -> tuple[Meeting, str]:
        """A meeting that this process, rank 0, is host to; and where others come to."""
        limit = timedelta(seconds=START)
        store = dist.TCPStore(address, 0, count, is_master=True, wait_for_workers=False, timeout=limit)
        return cls(store, 0, count), f"{address}:{store.port}"

    @classmethod
    def visit(cls, rank: int, count: int, address: str) -> Meeting:
        """The meeting at that address."""
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), count, is_master=False, timeout=timedelta(seconds=START))
        return cls(store, rank, count)

    @classmethod
    def around(cls) -> Meeting | None:
        """Where torchrun or Accelerate have started this process, the one they have prepared."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or "MASTER_ADDR" not in os.environ:
            return None
        store, rank, count = next(dist.rendezvous("env://", timeout=timedelta(seconds=START)))
        return cls(dist.PrefixStore("arborl", store), rank, count)

    def begin(self, device: torch.device, look: Callable[[], None] = lambda: None) -> None:
        """Wait until all are here, make sure that they are alike, and open the lines between them.

        Args:
            look: called while waiting; raises where there is nobody to wait for any more.
        """
        self.store.set(f"hello/{self.rank}", json.dumps(about_me(own_address(self.store))))
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
        dist.init_process_group(
            backend, store=dist.PrefixStore("lines", self.store), rank=self.rank, world_size=self.count, timeout=PATIENT
        )


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


def own_address(store: Any) -> str:
    """Of this host, where it talks with the one of the store; nothing where that cannot be said."""
    host = getattr(getattr(store, "underlying_store", store), "host", "")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect((host, 9))  # nothing is sent
        return str(line.getsockname()[0])
    return ""


def cut_lines(address: str) -> None:
    """Close all connections of this process to that host, which is lost: whoever waits for an answer from there notices
    now, and not when the network gives up, many minutes later."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # some are closed meanwhile, or connected to nobody
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as line:
                    far = line.family in (socket.AF_INET, socket.AF_INET6)
                    if far and line.getpeername()[0].removeprefix("::ffff:") == address:
                        line.shutdown(socket.SHUT_RDWR)


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
        self.store = meeting.store.clone()  # a connection of its own: whoever waits on one, holds it
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
