"""The connections over which ranks exchange tensors: which network they use, and proof of who is at the other end.

gloo accepts whoever connects first to the port on which a rank waits for another. So each pair of ranks proves, over
each connection of a new group and before anything else is sent over it, that both hold the session key.
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
from arborl.learner.run_store import seal

PROOF_SECONDS = 60.0
"""In which each other rank must have proved who it is."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def prove_connections(group: dist.ProcessGroup, session: str) -> None:
    """Send each other rank a proof of the session key over the group, and check theirs.

    Raises:
        ConfigError: another process answers in place of a rank.
    """
    rank, count, name = group.rank(), group.size(), group.group_name
    others = [other for other in range(count) if other != rank]
    heard = {other: torch.zeros(32, dtype=torch.uint8) for other in others}
    work = [dist.isend(proof(session, name, rank, other), group=group, group_dst=other) for other in others]
    work += [dist.irecv(heard[other], group=group, group_src=other) for other in others]
    for each in work:
        assert each is not None
        each.wait(timedelta(seconds=PROOF_SECONDS))
    for other, found in heard.items():
        if not hmac.compare_digest(bytes(found.tolist()), bytes(proof(session, name, other, rank).tolist())):
            raise ConfigError(
                f"learner.ranks: what is connected as rank {other} of {count} could not prove that it belongs to this "
                "run. Another process of this host or network has connected in its place. Start the run again, on a "
                "network that only trusted processes reach."
            )


def proof(session: str, name: str, sender: int, receiver: int) -> torch.Tensor:
    return torch.tensor(list(seal(session, "line", name, str(sender), str(receiver))), dtype=torch.uint8)


def use_interface_of(address: str) -> Callable[[], None]:
    """From now on gloo and NCCL use the network interface with this address, and not the one that the host's name
    stands for. Where `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` is set, it is kept.

    Returns:
        What undoes it.
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
    """The network interface that has this address; None where there is none, or the system does not say.

    Example:
        interface_of("127.0.0.1")     # "lo"
    """
    try:
        import fcntl
    except ImportError:
        return None
    for _, name in socket.if_nameindex():
        asked = struct.pack("256s", name.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line, suppress(OSError):
            found = fcntl.ioctl(line.fileno(), 0x8915, asked)  # SIOCGIFADDR
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def close_connections_to(address: str) -> None:
    """Close all connections of this process to that host, which is lost: a call that waits for an answer from there
    fails now, and not when the network gives up, many minutes later."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # some are closed meanwhile, or connected to nothing
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as line:
                    far = line.family in (socket.AF_INET, socket.AF_INET6)
                    if far and line.getpeername()[0].removeprefix("::ffff:") == address:
                        line.shutdown(socket.SHUT_RDWR)
