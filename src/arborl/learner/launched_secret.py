"""How processes that torchrun or Accelerate have started come to share a secret.

The store of the launcher serves every client, so a secret cannot pass through it. On one host rank 0 writes the secret
into a file of mode 0600 in a folder of mode 0700, and names the folder in that store. The other ranks read the file
only where file and folder are this user's and closed to others: another user can name a folder, and cannot make such a
one. On several hosts the environment of all of them holds the secret, and what rank 0 writes into the store is sealed
with it.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from arborl.errors import ConfigError
from arborl.learner.run_store import UNIX, JoinInfo, seal

SECRET = "ARBORL_RANKS_SECRET"
"""The variable with the secret of all ranks."""
SHORTEST = 32
"""Characters of a secret that a user sets."""
MAKE = "`openssl rand -hex 32`"
KEY = "where"
T = TypeVar("T")


def join_launched(store: Any, rank: int, host: Callable[[str, str], tuple[T, JoinInfo]]) -> T | JoinInfo:
    """In rank 0 a new meeting, of which the others are told; in others what they need to join it.

    Args:
        store: of the launcher.
        rank: of this process.
        host: makes a meeting, given this host's address and the secret, which both may be empty.
    """
    secret = os.environ.get(SECRET, "")
    if 0 < len(secret) < SHORTEST:
        raise ConfigError(f"{SECRET} has {len(secret)} characters. Take {SHORTEST} random ones: {MAKE}.")
    if rank == 0:
        meeting, info = host(address_for_others() if secret else "", secret)
        if not secret:
            write_secret(info)
        store.set(KEY, json.dumps([info.address, seal(secret, KEY, info.address).hex() if secret else ""]))
        return meeting
    address, sealed = json.loads(store.get(KEY))
    if not secret:
        return JoinInfo(address, read_secret(address))
    if not hmac.compare_digest(sealed, seal(secret, KEY, address).hex()):
        raise ConfigError(f"{SECRET} is not that of rank 0. Set the same on all hosts.")
    return JoinInfo(address, secret)


def address_for_others() -> str:
    """Of this host, rank 0's, as the other hosts know it."""
    name = os.environ["MASTER_ADDR"]
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if not alone and str(found).startswith(("127.", "::1")):
        raise ConfigError(
            f"MASTER_ADDR={name} is {found} on its own host, which other hosts cannot reach. Set the address that they "
            "reach it at (torchrun --master-addr)."
        )
    return str(found)


def write_secret(info: JoinInfo) -> None:
    """Beside the socket, for this user alone."""
    handle = os.open(secret_file(info.address), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(info.secret)


def read_secret(address: str) -> str:
    """The secret beside a socket."""
    several = (
        f"ranks were started on several hosts, or by several users. Set {SECRET} to the same random value for all of "
        f"them: {MAKE}."
    )
    if not address.startswith(UNIX):
        raise ConfigError(f"rank 0 has {SECRET} and this rank has not: {several}")
    file = secret_file(address)
    try:
        for path, is_kind in ((file.parent, stat.S_ISDIR), (file, stat.S_ISREG)):
            about = path.lstat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o077 or not is_kind(about.st_mode):
                raise ConfigError(f"{path}, named by the launcher's store, is not closed to other users: {several}")
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: {several}") from error


def secret_file(address: str) -> Path:
    return Path(address.removeprefix(UNIX)).parent / "secret"
