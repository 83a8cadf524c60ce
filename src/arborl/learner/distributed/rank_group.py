"""The ranks of a learner: collective operations, and the connections over which they exchange tensors.

With one rank, collective operations do nothing. Terms carry their share of the whole step's loss, so gradients are
summed and never averaged.

gloo accepts any process that connects first to the port where a rank waits for another. So each pair of ranks proves,
over each connection of a new group and before anything else is sent, that both hold the session key.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from arborl.errors import ConfigError
from arborl.learner.core.packing import chunks
from arborl.learner.distributed.run_store import hmac_sha256

T = TypeVar("T")

ORDER_TIMEOUT = timedelta(days=30)
"""Timeout of collective operations. Lost ranks are detected by heartbeats, and a rank may wait long for its next
call."""
BUCKET_SIZE = 2**25  # numbers that are reduced in one operation
PROOF_SECONDS = 60.0  # timeout of the proof of each other rank
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankGroup:
    """The ranks over which trees are distributed."""

    def __init__(self, group: dist.ProcessGroup | None = None, session: str = ""):
        self.group, self.session = group, session
        self.count: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()

    @property
    def is_distributed(self) -> bool:
        return self.count > 1

    def new_group(self) -> dist.ProcessGroup:
        """A second process group of the same ranks, for another thread."""
        made = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)
        assert made is not None
        prove_connections(made, self.session)
        return made

    def all_gather(self, value: T) -> list[T]:
        if not self.is_distributed:
            return [value]
        values: list[T | None] = [None] * self.count
        dist.all_gather_object(values, value, self.group)
        return values  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """On rank 0 the value of each rank; on other ranks an empty list."""
        if not self.is_distributed:
            return [value]
        values: list[T | None] | None = [None] * self.count if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []  # type: ignore[return-value]

    def sum(self, value: float) -> float:
        return float(sum(self.all_gather(value)))

    def any(self, value: bool) -> bool:
        return any(self.all_gather(value))

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place."""
        if self.is_distributed:
            for bucket in chunks(tensors, _fits):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self.group)
                for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))


SINGLE_RANK = RankGroup()


def _fits(bucket: list[Tensor], tensor: Tensor) -> bool:
    same = (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
    return same and sum(one.numel() for one in bucket) + tensor.numel() <= BUCKET_SIZE


def prove_connections(group: dist.ProcessGroup, session: str) -> None:
    """Send each other rank a proof of the session key over the group, and check theirs."""
    rank, count, name = group.rank(), group.size(), group.group_name
    others = [other for other in range(count) if other != rank]
    received = {other: torch.zeros(32, dtype=torch.uint8) for other in others}
    work = [dist.isend(proof(session, name, rank, other), group=group, group_dst=other) for other in others]
    work += [dist.irecv(received[other], group=group, group_src=other) for other in others]
    for each in work:
        assert each is not None
        each.wait(timedelta(seconds=PROOF_SECONDS))
    for other, answer in received.items():
        if not hmac.compare_digest(bytes(answer.tolist()), bytes(proof(session, name, other, rank).tolist())):
            raise ConfigError(
                f"learner.ranks: the process connected as rank {other} of {count} did not prove that it belongs to "
                "this run. Another process of this host or network has connected in its place. Start the run again, "
                "on a network that only trusted processes reach."
            )


def proof(session: str, name: str, sender: int, receiver: int) -> torch.Tensor:
    return torch.tensor(list(hmac_sha256(session, "line", name, str(sender), str(receiver))), dtype=torch.uint8)


def use_interface_of(address: str) -> Callable[[], None]:
    """Make gloo and NCCL use the network interface with this address, instead of the one of the host's name. Existing
    values of `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` are kept."""
    name = interface_of(address)
    added = [variable for variable in INTERFACES if name is not None and variable not in os.environ]
    for variable in added:
        os.environ[variable] = name or ""

    def undo() -> None:
        for variable in added:
            os.environ.pop(variable, None)

    return undo


def interface_of(address: str) -> str | None:
    try:
        import fcntl
    except ImportError:
        return None
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection, suppress(OSError):
            reply = fcntl.ioctl(connection.fileno(), 0x8915, request)  # SIOCGIFADDR
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def close_connections_to(address: str) -> None:
    """Close all connections of this process to a lost host, so that a call that waits for an answer fails now instead
    of after the network's timeout of many minutes."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    far = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if far and connection.getpeername()[0].removeprefix("::ffff:") == address:
                        connection.shutdown(socket.SHUT_RDWR)
