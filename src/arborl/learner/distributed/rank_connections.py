"""The connections over which ranks exchange tensors: choice of network interface, and authentication of each peer.

gloo accepts any process that connects first to the port where a rank waits for another. So each pair of ranks proves,
over each connection of a new group and before anything else is sent, that both hold the session key.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from arborl.errors import ConfigError
from arborl.learner.distributed.run_store import hmac_sha256

PROOF_SECONDS = 60.0
"""Timeout of the proof of each other rank."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def prove_connections(group: dist.ProcessGroup, session: str) -> None:
    """Send each other rank a proof of the session key over the group, and check theirs.

    Raises:
        ConfigError: another process answers in place of a rank.
    """
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
    values of `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` are kept.

    Returns:
        A function that undoes it.
    """
    name = interface_of(address)
    added = [variable for variable in INTERFACES if name is not None and variable not in os.environ]
    for variable in added:
        os.environ[variable] = name or ""

    def undo() -> None:
        for variable in added:
            os.environ.pop(variable, None)

    return undo


def interface_of(address: str) -> str | None:
    """The network interface with this address; None if there is none or the system does not report it.

    Example:
        interface_of("127.0.0.1")     # "lo"
    """
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
